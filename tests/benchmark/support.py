"""Rows and command lines for the benchmark's tests."""

import json
from pathlib import Path
from typing import Any

from hf_ddtree.benchmark.case import Case
from hf_ddtree.benchmark.stages import FORWARDS, STAGES

Row = dict[str, Any]


def options(folder: Path, drafter: str, *more: str) -> list[str]:
    """Return the options of a small fp32 run that writes to the drafter's folder. Later options win."""
    arguments = ["--model", str(folder / "target"), "--assistant-model", str(folder / drafter), "--dtype", "float32"]
    arguments += ["--prompts", str(folder / "prompts.jsonl"), "--tree-budgets", "4,9", "--max-new-tokens", "12"]
    return [*arguments, "--output", str(folder / drafter / "results"), *more]


def read_rows(path: Path, pass_name: str = "speed") -> list[Row]:
    """Return the rows of one pass in a row file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["pass"] == pass_name]


def speed_rows(times: dict[str, list[float]]) -> list[Row]:
    """Return greedy rows of the speed pass with 10 new tokens each, from the seconds of each method by prompt."""
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


def timing_row(rounds: int, *seconds: float) -> Row:
    """Return a greedy row of the timing pass, with the seconds of each stage and then of each forward."""
    row = {"pass": "timing", "temperature": 0.0, "method": "tree 4", "tree_budget": 4, "rounds": rounds}
    return {**row, "seconds": dict(zip((*STAGES, *FORWARDS), seconds, strict=True))}


def case(target, input_ids, **fields) -> Case:
    """Return a greedy case of 4 new tokens."""
    defaults = {"kind": "all", "seed": 0, "temperature": 0.0, "max_new_tokens": 4}
    return Case(target, input_ids, **{**defaults, **fields})
