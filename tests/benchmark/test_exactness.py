"""Where a greedy text leaves plain generate's."""

import math

import pytest
import torch
from helpers import random_ids

from hf_ddtree.benchmark.exactness import exactness, gap_below
from hf_ddtree.testing import tiny_model


def test_exactness_measures_the_gap_in_plain_scores_after_the_processors():
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
def test_gap_below_is_one_ulp_for_neighbouring_numbers(best, dtype):
    value = torch.tensor(best, dtype=dtype)
    above = (value.view(torch.int16) + (1 if best > 0 else -1)).view(dtype)  # the next larger number
    scores = torch.stack([value, above]).float()
    gap, ulps = gap_below(scores, 0, dtype)
    assert gap == float(above) - float(value) and ulps == 1
