"""The command line of the benchmark."""

import pytest
from benchmark.support import options

from hf_ddtree.benchmark import options as options_module
from hf_ddtree.benchmark.options import PROMPTS, parse_options
from hf_ddtree.training.prompts import read_prompts


def test_parse_options_has_a_default_for_everything():
    assert parse_options([]).tree_budgets == [16, 32, 64, 128, 256, 512, 1024, "auto"]
    assert parse_options([]).temperatures == [0.0, 1.0]
    assert parse_options([]).prompts == str(PROMPTS)


def test_parse_options_reads_lists():
    parsed = parse_options(["--tree-budgets", "8,auto", "--temperatures", "0,0.7"])
    assert parsed.tree_budgets == [8, "auto"]
    assert parsed.temperatures == [0.0, 0.7]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tree-budgets", "0"],
        ["--tree-budgets", "16385"],
        ["--tree-budgets", "x"],
        ["--temperatures", "-1"],
        ["--temperatures", "1,warm"],
        ["--temperatures", "nan"],
    ],
)
def test_parse_options_refuses_impossible_values(folder, wrong, capsys):
    with pytest.raises(SystemExit):
        parse_options(options(folder, "drafter", *wrong))
    assert wrong[0] in capsys.readouterr().err


def test_parse_options_refuses_output_without_matplotlib(folder, monkeypatch, capsys):
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_options(options(folder, "drafter"))
    assert "pip install matplotlib" in capsys.readouterr().err


def test_prompts_are_of_eight_kinds():
    prompts = read_prompts(str(PROMPTS))
    kinds = [prompt["kind"] for prompt in prompts]
    assert len(prompts) >= 48 and len(set(kinds)) == 8 and min(kinds.count(kind) for kind in kinds) >= 5
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == len(prompts)
