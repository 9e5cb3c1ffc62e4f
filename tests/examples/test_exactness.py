"""examples/measure/exactness.py on a small sample of the embedded model, in both dtypes.

The full comparison has 12 prompts, 128 tokens and budgets up to 256. It is the script without options.
"""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, random_ids

from hf_ddtree.benchmark.exactness import gap_below
from hf_ddtree.testing import tiny_model

SCRIPT = ROOT / "examples" / "measure" / "exactness.py"
SAMPLE = ["--prompts", "1", "--max-new-tokens", "20", "--budgets", "12"]


def report(*arguments: str) -> dict:
    """Run the script, and return the JSON line that it ends with."""
    command = [sys.executable, str(SCRIPT), *SAMPLE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.usefixtures("embedded")  # converts the model once, before another process needs it
def test_exactness_float32_tokens_are_equal_greedy_and_sampled():
    found = report()
    assert found["compared"] == 2 * 3  # modes, drafters
    assert sum(found["equal"].values()) == found["compared"]


@pytest.mark.usefixtures("embedded")
def test_exactness_bfloat16_tokens_are_near_ties_of_the_maximum():
    found = report("--dtype", "bfloat16", "--drafters", "prompt_lookup", "truncated")["teacher_forced"]
    assert found["truncated/12"]["tokens"] == 20


def test_gaps_below_maximum_are_those_of_plain_decoding(script):
    model, prompt = tiny_model("llama").to(torch.bfloat16), random_ids(6)
    settings = {"max_new_tokens": 2, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    outputs = model.generate(prompt, **settings)
    first, _ = outputs.sequences[0, 6:].tolist()
    scores = outputs.scores[1][0].float()
    second = int(scores.topk(2).indices[1])
    _, gap_ulps = gap_below(scores, second, torch.bfloat16)
    assert gap_ulps > 0
    assert script("exactness").gaps_below_maximum(model, prompt, [first, second]) == [0, gap_ulps]
