"""The benchmark on a tiny target: that it compares what it says, and what its figures mean."""

import json
import math
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from helpers import char_tokenizer, random_ids
from test_speculators import write as write_speculators_drafter

import hf_ddtree
from hf_ddtree.benchmark import __main__ as main_module
from hf_ddtree.benchmark import run as run_module
from hf_ddtree.benchmark.__main__ import PROMPTS, TREE_BUDGETS, main, parse
from hf_ddtree.benchmark.measure import acceptance, exactness, first_difference, gap_below, measure_prompt
from hf_ddtree.benchmark.methods import methods
from hf_ddtree.benchmark.plots import save_plots
from hf_ddtree.benchmark.report import baseline_table, interval, kind_table, speedups, stage_table, summarize, table
from hf_ddtree.benchmark.stages import FORWARDS, STAGES, drafting_modules, forward_times
from hf_ddtree.output import Round
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


def options(folder, drafter: str, *more: str) -> list[str]:
    """A small run in fp32 that writes to a folder of the drafter; later options win."""
    arguments = ["--model", str(folder / "target"), "--assistant-model", str(folder / drafter), "--dtype", "float32"]
    arguments += ["--prompts", str(folder / "prompts.jsonl"), "--tree-budgets", "4,9", "--max-new-tokens", "12"]
    return [*arguments, "--output", str(folder / drafter / "results"), *more]


def read_rows(path: Path, which: str = "speed") -> list[dict]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["pass"] == which]


@pytest.mark.parametrize("drafter, native", [("drafter", "chain"), ("small", "native assisted")])
def test_every_method_answers_every_prompt_and_equals_plain(folder, capsys, drafter, native):
    main(options(folder, drafter))
    rows = read_rows(folder / drafter / "results.jsonl")
    names = ["plain", "native look-up", native, "tree 4", "tree 9"]
    assert [row["method"] for row in rows] == names * 4
    assert {(row["temperature"], row["kind"]) for row in rows} == {
        (t, k) for t in (0, 1) for k in ("letters", "digits")
    }
    for row in rows:
        assert row["new_tokens"] == 12 and row["seconds"] > 0 and row["dtype"] == "float32"
        assert row["context_tokens"] == row["prompt_tokens"] + 12
        assert row.get("differs_at") is None
        in_rounds = row["method"] in ("chain", "tree 4", "tree 9")
        assert (row["tokens_per_round"] is not None) == (row["accepted_lengths"] is not None) == in_rounds
    timed = read_rows(folder / drafter / "results.jsonl", "timing")
    assert [row["method"] for row in timed] == [name for name in names if name in ("chain", "tree 4", "tree 9")] * 4
    for row in timed:
        assert set(row["seconds"]) == {*STAGES, *FORWARDS} and row["rounds"] > 0
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names) and "Milliseconds per round" in printed
    for name in ("tokens_per_round", "speedup", "stages", "acceptance"):
        assert (folder / drafter / f"results-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_keeps_what_it_has(folder, tmp_path, monkeypatch, capsys):
    original = run_module.measure_prompt

    def interrupted(*args):
        if args[-1] == 1:
            assert {row["seed"] for row in read_rows(tmp_path / "new" / "results.jsonl")} == {0}
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(run_module, "measure_prompt", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        main(options(folder, "drafter", "--output", str(tmp_path / "new" / "results")))
    assert {row["seed"] for row in read_rows(tmp_path / "new" / "results.jsonl")} == {0}
    assert "| tree 4 |" in capsys.readouterr().out and (tmp_path / "new" / "results-speedup.png").exists()


def test_two_processes_share_the_prompts(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "ab" * i, "kind": f"{i}"}) for i in range(1, 6)))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]  # or two CPUs
    small = ["--prompts", str(prompts), "--max-new-tokens", "4", "--output", str(tmp_path / "two")]
    command = [*launch, "-m", "hf_ddtree.benchmark", *options(folder, "drafter", *small, "--temperatures", "0")]
    result = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    rows = read_rows(tmp_path / "two.jsonl")
    names = ["plain", "native look-up", "chain", "tree 4", "tree 9"]
    assert [(row["seed"], row["kind"], row["method"]) for row in rows] == [
        (seed, f"{seed + 1}", name) for seed in range(5) for name in names
    ]
    assert {row["processes"] for row in rows} == {2}
    assert result.stdout.count("5/5") == len(names)  # one process prints, for all


def test_the_console_script_is_the_command():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    entry = EntryPoint("ddtree-benchmark", project["scripts"]["ddtree-benchmark"], "console_scripts")
    assert entry.load() is main


def test_auto_is_a_budget(folder):
    assert parse([]).tree_budgets == TREE_BUDGETS == [16, 32, 64, 128, 256, 512, 1024, "auto"]
    budgets = parse(["--tree-budgets", "8,auto"]).tree_budgets
    assert budgets == [8, "auto"]
    method = methods(tiny_model("llama"), None, budgets)[-1]
    assert (method.name, method.tree_budget, method.arguments()["tree_budget"]) == ("tree auto", "auto", "auto")


def test_plots_are_refused_at_once_where_they_cannot_be_drawn(folder, monkeypatch, capsys):
    monkeypatch.setattr(main_module, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(options(folder, "drafter"))
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_text_that_differs_in_fp32_fails_the_run(folder, monkeypatch):
    original = hf_ddtree.benchmark.measure.first_difference
    monkeypatch.setattr(
        "hf_ddtree.benchmark.measure.first_difference", lambda tokens, wanted: original([*tokens[:-1], -1], wanted)
    )
    with pytest.raises(SystemExit, match="fp32 texts differ"):
        main(options(folder, "drafter", "--temperatures", "0"))


@pytest.mark.parametrize("wrong", [["--tree-budgets", "0"], ["--temperatures", "-1"], ["--tree-budgets", "x"]])
def test_impossible_options_are_refused(folder, wrong, capsys):
    with pytest.raises(SystemExit):
        main(options(folder, "drafter", *wrong))
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


def test_the_gap_is_that_of_plain_decoding_after_its_processors():
    target = tiny_model("llama")
    target.generation_config.repetition_penalty = 1.3
    prompt = random_ids(6)
    plain = target.generate(prompt, max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True)
    text = plain.sequences[0, 6:].tolist()
    second = plain.scores[5][0].topk(2)
    texts = {"plain": text, "tree 4": [*text[:5], int(second.indices[1]), 9, 9], "tree 9": text[:3]}
    found = exactness(target, prompt, texts)
    assert found["plain"] == {"differs_at": None}
    assert found["tree 4"]["differs_at"] == 5
    assert found["tree 4"]["gap"] == pytest.approx(float(second.values[0] - second.values[1])) and second.values[0] > 0
    assert found["tree 9"] == {"differs_at": 3, "gap": math.inf, "gap_ulps": math.inf}


@pytest.mark.parametrize("best", [1.0, 1.9, 24.0, -3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_ulp_is_the_distance_of_neighbours(best, dtype):
    value = torch.tensor(best, dtype=dtype)
    above = (value.view(torch.int16) + (1 if best > 0 else -1)).view(dtype)  # the next number up
    scores = torch.stack([value, above]).float()
    gap, ulps = gap_below(scores, 0, dtype)
    assert gap == float(above) - float(value) and ulps == 1


def test_acceptance_counts_rounds_by_accepted_length():
    rounds = [Round(tree_size=size, accepted_length=length) for size, length in ((4, 2), (4, 0), (1, 2), (3, 1))]
    assert acceptance(rounds) == {"tokens_per_round": 2.25, "tree_size": 3.0, "accepted_lengths": [1, 1, 2]}


def speculators_drafter(target, folder):
    write_speculators_drafter(folder, target)
    return hf_ddtree.load_drafter(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "make, calls", [(lambda t, _: tiny_dflash_drafter(t), 2), (speculators_drafter, 2), (lambda *_: None, 0)]
)
def test_forwards_are_told_from_the_host(tmp_path, make, calls):
    """One target forward after the prefill and `calls` calls to draft (drafter and head) in every round that drafts."""
    target = hf_ddtree.enable(tiny_model("llama"))
    drafter, prompt = make(target, tmp_path), random_ids(8)
    settings = {"assistant_model": drafter, "tree_budget": 4, "max_new_tokens": 12, "return_dict_in_generate": True}
    target.generate(prompt, do_sample=False, **settings)  # with the check on first use
    with forward_times(target, drafting_modules(target, drafter)) as times:
        rounds = target.generate(prompt, do_sample=False, **settings).rounds
    assert len(times["target forward"]) == 1 + len(rounds)
    drafting = rounds if calls == 0 else [r for r in rounds if r.tree_size]
    assert len(times["drafter forward"]) == calls * len(drafting)
    target.generate(prompt, do_sample=False, **settings)
    assert len(times["target forward"]) == 1 + len(rounds)


def rows_of(times: dict[str, list[float]]) -> list[dict]:
    shared = {"pass": "speed", "temperature": 0.0, "new_tokens": 10, "differs_at": None}
    shared |= {"tokens_per_round": 2.0, "tree_size": 3.0, "accepted_lengths": [1, 0, 1]}
    return [
        {
            **shared,
            "method": method,
            "tree_budget": {"tree 4": 4, "tree auto": "auto"}.get(method),
            "seed": seed,
            "kind": "even" if seed % 2 == 0 else "odd",
            "seconds": seconds,
        }
        for method, values in times.items()
        for seed, seconds in enumerate(values)
    ]


def timing_row(rounds: int, *seconds: float) -> dict:
    row = {"pass": "timing", "temperature": 0.0, "method": "tree 4", "tree_budget": 4, "rounds": rounds}
    return {**row, "seconds": dict(zip((*STAGES, *FORWARDS), seconds))}


def test_speedups_are_ratios_on_the_same_prompt():
    """A slow prompt, or a slow hour, must not count against the method that met it."""
    rows = rows_of({"plain": [1.0, 10.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})
    ratios = speedups(rows)
    assert ratios[0.0, "tree 4"] == {"even": [2.0, 2.0], "odd": [2.0]}
    assert "| tree 4 | 2.00 (2.00-2.00) | 10.0 | 2.00 | 3.0 | 3/3 | - |" in table(rows)
    assert "| tree 4 | 2.00 | 2.00 |" in kind_table(rows)
    assert summarize(rows)[0.0]["tree 4"].accepted_lengths.tolist() == [3, 0, 3]


def test_trees_are_compared_with_every_method_without_one():
    rows = rows_of({"plain": [1.0, 10.0, 2.0], "chain": [0.8, 5.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})
    assert "| method | plain | chain |\n|---|---|---|\n| tree 4 | 2.00 | 1.60 |" in baseline_table(rows)


def test_the_table_has_the_largest_gap():
    rows = rows_of({"plain": [1.0, 1.0, 1.0], "tree 4": [1.0, 1.0, 1.0]})
    rows[3] |= {"differs_at": 2, "gap": 0.125, "gap_ulps": 1.0}
    rows[5] |= {"differs_at": 7, "gap": 0.25, "gap_ulps": 2.0}
    assert "| 1/3 | 0.25 (2 ulp) |" in table(rows)


def test_timing_rows_are_means_per_round_and_no_speed():
    speed = rows_of({"plain": [1.0], "tree 4": [0.5]})
    timing = [timing_row(1, 0.1, 0.3, 0.01, 0.02, 0.08, 0.2), timing_row(3, 0.3, 0.5, 0.03, 0.02, 0.24, 0.4)]
    assert "| tree 4 | 320.00 | 100.00 | 200.00 | 10.00 | 10.00 | 80.00 | 150.00 | 90.00 |" in stage_table(
        timing + speed
    )
    assert table(speed + timing) == table(speed)


def test_plots_are_drawn_from_what_there_is(tmp_path):
    rows = rows_of({"plain": [1.0, 2.0], "chain": [0.8, 1.5], "tree 4": [0.5, 1.0], "tree auto": [0.4, 1.0]})
    assert save_plots([], str(tmp_path / "none")) == []
    assert len(save_plots(rows, str(tmp_path / "speed"))) == 3
    assert len(save_plots([*rows, timing_row(2, 1, 1, 1, 1, 1, 1)], str(tmp_path / "both"))) == 4
    assert len(list(tmp_path.glob("*.png"))) == 7


def test_the_cost_of_verification_is_printed_and_drawn(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(options(folder, "drafter", "--tree-budgets", "4,auto", "--temperatures", "0", "--limit", "1"))
    printed = capsys.readouterr().out
    assert "| tree auto |" in printed and "| n | measured, " in printed
    assert list(folder.glob("drafter/*-verify_cost.png"))


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
