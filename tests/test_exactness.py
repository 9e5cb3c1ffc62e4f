"""The embedded model in both dtypes: the exactness example, which compares with plain decoding, on a small sample.

The full comparison (12 prompts, 128 tokens, budgets up to 256) is `python examples/exactness.py`.
"""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

EXAMPLE = next((ROOT / "examples").rglob("exactness.py"))
SAMPLE = ["--prompts", "1", "--max-new-tokens", "20", "--budgets", "12"]


def run(*arguments: str) -> dict:
    """Run the example, and return the JSON line that it ends with."""
    command = [sys.executable, str(EXAMPLE), *SAMPLE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.usefixtures("embedded")  # converts the model once, before another process needs it
def test_exactness_float32_tokens_are_equal_greedy_and_sampled():
    report = run()
    assert report["compared"] == 2 * 3  # modes, drafters
    assert sum(report["equal"].values()) == report["compared"]


@pytest.mark.usefixtures("embedded")
def test_exactness_bfloat16_tokens_are_near_ties_of_the_maximum():
    report = run("--dtype", "bfloat16", "--drafters", "prompt_lookup", "truncated")["teacher_forced"]
    assert report["truncated/12"]["tokens"] == 20
