"""The real model: the exactness example, which compares with plain decoding, on a small sample in both dtypes.

The full comparison (12 prompts, 128 tokens, budgets up to 256) is `python examples/exactness.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "exactness.py"
SAMPLE = ["--prompts", "1", "--max-new-tokens", "20", "--budgets", "12"]


def run(*arguments) -> dict:
    command = [sys.executable, str(EXAMPLE), *SAMPLE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.usefixtures("embedded")  # converted once, not by two processes
def test_float32_tokens_are_equal_greedy_and_sampled():
    report = run()
    assert report["compared"] == 2 * 3  # modes, drafters
    assert sum(report["equal"].values()) == report["compared"]


@pytest.mark.usefixtures("embedded")
def test_bfloat16_tokens_are_near_ties_of_the_maximum():
    report = run("--dtype", "bfloat16", "--drafters", "prompt_lookup", "truncated")["teacher_forced"]
    assert report["truncated/12"]["tokens"] == 20
