"""The benchmark on a tiny target: that it compares what it says, and what its figures mean."""

import json

import pytest
import torch
from helpers import char_tokenizer

import hf_ddtree
from hf_ddtree.benchmark.__main__ import PROMPTS, main
from hf_ddtree.benchmark.measure import first_difference, measure_prompt
from hf_ddtree.benchmark.methods import methods
from hf_ddtree.benchmark.report import interval, kind_table, speedups, table
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.prompts import read_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark")
    target = tiny_model("llama")
    target.save_pretrained(path / "target")
    char_tokenizer().save_pretrained(path / "target")
    tiny_dflash_drafter(target).save_pretrained(path / "drafter")
    tiny_model("llama", seed=1).save_pretrained(path / "small")
    prompts = [{"prompt": "abcab", "kind": "letters"}, {"prompt": "12312", "kind": "digits"}]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return path


def run(folder, drafter: str, *more: str) -> None:
    arguments = ["--model", str(folder / "target"), "--assistant-model", str(folder / drafter), "--dtype", "float32"]
    arguments += ["--prompts", str(folder / "prompts.jsonl"), "--tree-budgets", "4,9", "--max-new-tokens", "12"]
    main([*arguments, "--output", str(folder / drafter / "results"), *more])


@pytest.mark.parametrize("drafter, native", [("drafter", "chain"), ("small", "native assisted")])
def test_every_method_answers_every_prompt_and_equals_plain(folder, capsys, drafter, native):
    run(folder, drafter)
    rows = [json.loads(line) for line in (folder / drafter / "results.jsonl").read_text().splitlines()]
    names = ["plain", "native look-up", native, "tree 4", "tree 9"]
    assert [row["method"] for row in rows] == names * 4
    assert {(row["temperature"], row["kind"]) for row in rows} == {
        (t, k) for t in (0, 1) for k in ("letters", "digits")
    }
    for row in rows:
        assert row["new_tokens"] == 12 and row["seconds"] > 0 and row["dtype"] == "float32"
        assert row.get("differs_at") is None
        assert (row["tokens_per_round"] is not None) == (row["method"] in ("chain", "tree 4", "tree 9"))
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names)


def test_a_text_that_differs_in_fp32_fails_the_run(folder, monkeypatch):
    original = hf_ddtree.benchmark.measure.first_difference
    monkeypatch.setattr(
        "hf_ddtree.benchmark.measure.first_difference", lambda tokens, wanted: original([*tokens[:-1], -1], wanted)
    )
    with pytest.raises(SystemExit, match="fp32 texts differ"):
        run(folder, "drafter", "--temperatures", "0")


@pytest.mark.parametrize("wrong", [["--tree-budgets", "0"], ["--temperatures", "-1"], ["--tree-budgets", "x"]])
def test_impossible_options_are_refused(folder, wrong, capsys):
    with pytest.raises(SystemExit):
        run(folder, "drafter", *wrong)
    assert wrong[0] in capsys.readouterr().err


def test_the_methods_take_turns(folder):
    target = hf_ddtree.enable(tiny_model("llama"))
    order = []

    def spy(name, arguments):
        def call():
            order.append(name)
            return arguments()

        return call

    compared = methods(target, tiny_dflash_drafter(target), [4])
    for method in compared:
        object.__setattr__(method, "arguments", spy(method.name, method.arguments))
    prompt = {"messages": [{"role": "user", "content": "ab"}], "kind": "all"}
    for seed in range(2):
        measure_prompt(target, char_tokenizer(), prompt, compared, 0.0, 4, seed)
    names = [method.name for method in compared]
    assert order == names + names[1:] + names[:1]


@pytest.mark.parametrize(
    "tokens, expected, index", [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2)]
)
def test_first_difference(tokens, expected, index):
    assert first_difference(tokens, expected) == index


def rows_of(times: dict[str, list[float]]) -> list[dict]:
    shared = {"temperature": 0.0, "new_tokens": 10, "tokens_per_round": 2.0, "differs_at": None}
    return [
        {**shared, "method": method, "seed": seed, "kind": "even" if seed % 2 == 0 else "odd", "seconds": seconds}
        for method, values in times.items()
        for seed, seconds in enumerate(values)
    ]


def test_speedups_are_ratios_on_the_same_prompt():
    """A slow prompt, or a slow hour, must not count against the method that met it."""
    rows = rows_of({"plain": [1.0, 10.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})
    ratios = speedups(rows)
    assert ratios[0.0, "tree 4"] == {"even": [2.0, 2.0], "odd": [2.0]}
    assert "| tree 4 | 2.00 (2.00-2.00) | 10.0 | 2.00 | 3/3 |" in table(rows)
    assert "| tree 4 | 2.00 | 2.00 |" in kind_table(rows)


def test_the_interval_holds_the_median_and_narrows_with_the_sample():
    generator = torch.Generator().manual_seed(0)
    small, large = (torch.randn(n, generator=generator).add(2).tolist() for n in (10, 1000))
    for sample in (small, large):
        low, high = interval(sample)
        assert low <= float(torch.tensor(sample).median()) <= high
    assert interval(large)[1] - interval(large)[0] < interval(small)[1] - interval(small)[0]


def test_the_built_in_prompts_are_of_eight_kinds():
    prompts = read_prompts(str(PROMPTS))
    kinds = [prompt["kind"] for prompt in prompts]
    assert len(prompts) >= 48 and len(set(kinds)) == 8 and min(kinds.count(kind) for kind in kinds) >= 5
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == len(prompts)
