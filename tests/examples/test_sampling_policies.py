"""examples/measure/sampling_policies.py."""

from argparse import Namespace

import pytest

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

OPTIONS = Namespace(temperatures=[0.5], budgets=[8, 64], policies=["target", "hybrid"])
COUNTS = {
    (0.5, 8, "target"): [(20, 10), (10, 5)],
    (0.5, 8, "hybrid"): [(30, 10), (15, 5)],
    (0.5, 64, "target"): [(40, 10), (20, 5)],
    (0.5, 64, "hybrid"): [(40, 10), (20, 5)],
}


def test_table_has_pooled_tokens_per_round_with_intervals(script):
    lines = script("sampling_policies").table(COUNTS, OPTIONS).splitlines()
    assert lines[0] == "| temperature | budget | target | hybrid |" and lines[1] == "|---|---|---|---|"
    assert lines[2] == "| 0.5 | 8 | 2.00 (2.00-2.00) | 3.00 (3.00-3.00) |"


def test_pooled_gain_compares_accepted_lengths_of_the_smaller_budgets(script):
    assert script("sampling_policies").pooled_gain(COUNTS, OPTIONS) == {"0.5": {"target": 1.0, "hybrid": 2.0}}


@pytest.mark.parametrize("policy", hf_ddtree.POLICIES)
def test_emitted_and_rounds_counts_the_tokens_after_the_first(script, policy):
    model = hf_ddtree.enable(tiny_model("llama"))
    inputs = {"input_ids": model.dummy_inputs["input_ids"][:1]}
    request = {"max_new_tokens": 12, "temperature": 1.0, "tree_budget": 4, "tree_sampling": policy}
    drafter = tiny_dflash_drafter(model)
    emitted, rounds = script("sampling_policies").emitted_and_rounds(model, drafter, inputs, 0, request)
    assert emitted == 11 and 0 < rounds <= 11  # the prefill emits the first token
