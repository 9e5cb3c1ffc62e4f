"""The whole benchmark on a tiny target."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest
from benchmark.support import options, read_rows
from helpers import ROOT

from hf_ddtree.benchmark import exactness as exactness_module
from hf_ddtree.benchmark import run as run_module
from hf_ddtree.benchmark.__main__ import main
from hf_ddtree.benchmark.stages import FORWARDS, STAGES

IN_ROUNDS = ("chain", "tree 4", "tree 9")


@pytest.mark.parametrize("drafter, native", [("drafter", "chain"), ("small", "native assisted")])
def test_main_lets_every_method_answer_every_prompt_as_plain_generate(folder, capsys, drafter, native):
    main(options(folder, drafter))
    rows = read_rows(folder / drafter / "results.jsonl")
    names = ["plain", "native look-up", native, "tree 4", "tree 9"]
    assert [row["method"] for row in rows] == names * 4
    expected = {(temperature, kind) for temperature in (0, 1) for kind in ("letters", "digits")}
    assert {(row["temperature"], row["kind"]) for row in rows} == expected
    for row in rows:
        assert row["new_tokens"] == 12 and row["seconds"] > 0 and row["dtype"] == "float32"
        assert row["context_tokens"] == row["prompt_tokens"] + 12
        assert row.get("differs_at") is None
        in_rounds = row["method"] in IN_ROUNDS
        assert (row["tokens_per_round"] is not None) == (row["accepted_lengths"] is not None) == in_rounds
    timed = read_rows(folder / drafter / "results.jsonl", "timing")
    assert [row["method"] for row in timed] == [name for name in names if name in IN_ROUNDS] * 4
    for row in timed:
        assert set(row["seconds"]) == {*STAGES, *FORWARDS} and row["rounds"] > 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names) and "Milliseconds per round" in printed
    for name in ("tokens_per_round", "speedup", "stages", "acceptance"):
        assert (folder / drafter / f"results-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_main_interrupted_keeps_the_finished_prompts(folder, tmp_path, monkeypatch, capsys):
    original = run_module.speed_rows
    file = tmp_path / "new" / "results.jsonl"

    def interrupted(case, methods):
        if case.seed == 1:
            assert {row["seed"] for row in read_rows(file)} == {0}
            raise KeyboardInterrupt
        return original(case, methods)

    monkeypatch.setattr(run_module, "speed_rows", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        main(options(folder, "drafter", "--output", str(tmp_path / "new" / "results")))
    assert {row["seed"] for row in read_rows(file)} == {0}
    assert "| tree 4 |" in capsys.readouterr().out and (tmp_path / "new" / "results-speedup.png").exists()


def test_main_of_two_processes_shares_the_prompts(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "ab" * i, "kind": f"{i}"}) for i in range(1, 6)))
    # without GPUs, --multi_gpu starts two processes on the CPU
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    small = ["--prompts", str(prompts), "--max-new-tokens", "4", "--output", str(tmp_path / "two")]
    command = [*launch, "-m", "hf_ddtree.benchmark", *options(folder, "drafter", *small, "--temperatures", "0")]
    result = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "two.jsonl")
    names = ["plain", "native look-up", "chain", "tree 4", "tree 9"]
    expected = [(seed, f"{seed + 1}", name) for seed in range(5) for name in names]
    assert [(row["seed"], row["kind"], row["method"]) for row in rows] == expected
    assert {row["processes"] for row in rows} == {2}
    assert result.stdout.count("5/5") == len(names)  # one process prints the tables of all prompts


def test_main_with_a_differing_fp32_text_fails(folder, monkeypatch):
    original = exactness_module.first_difference
    monkeypatch.setattr(
        exactness_module, "first_difference", lambda tokens, expected: original([*tokens[:-1], -1], expected)
    )
    with pytest.raises(SystemExit, match="fp32 texts differ"):
        main(options(folder, "drafter", "--temperatures", "0"))


def test_main_with_auto_prints_and_draws_the_verify_cost(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = str(tmp_path / "results")
    main(
        options(
            folder, "drafter", "--tree-budgets", "4,auto", "--temperatures", "0", "--limit", "1", "--output", output
        )
    )
    printed = capsys.readouterr().out
    assert "| tree auto |" in printed and "| n | measured, " in printed
    assert (tmp_path / "results-verify_cost.png").read_bytes().startswith(b"\x89PNG")


def test_main_is_the_console_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = EntryPoint("ddtree-benchmark", project["scripts"]["ddtree-benchmark"], "console_scripts")
    assert entry.load() is main
