"""Token equality with plain decoding, for every target family, attention implementation and kind of drafter."""

import pytest
import torch
from helpers import generate as generate_seeded
from helpers import random_ids, scripted

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.testing import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    RECURRENT_FAMILIES,
    WINDOW,
    ScriptedDrafter,
    tiny_dflash_drafter,
    tiny_model,
    tiny_muse_glimmer_drafter,
)

NEW_TOKENS = 64
PROMPT = random_ids(WINDOW + 8, seed=1)  # longer than the window, so the window matters from the first round on
OPTIONS = {
    "tree_budget": 12,
    "tree_sampling": "target",  # with this policy, a seed gives the text that plain sampling gives
    "return_dict_in_generate": True,
}
DRAFTERS = {
    "prompt look-up": lambda target, sequence: None,
    "causal LM": lambda target, sequence: target,
    "DFlash": lambda target, sequence: tiny_dflash_drafter(target),
    "Muse Glimmer": lambda target, sequence: tiny_muse_glimmer_drafter(target),
    "scripted": lambda target, sequence: scripted(sequence, hit_rate=0.8),
}


def generate(model, do_sample: bool, **kwargs):
    settings = {"do_sample": True, "temperature": 0.8} if do_sample else {"do_sample": False}
    return generate_seeded(model, PROMPT, seed=5, max_new_tokens=NEW_TOKENS, **settings, **kwargs)


def assert_equal_to_plain(model, make_drafter, do_sample: bool):
    """Assert that the tree gives the tokens of the plain model, and return its output."""
    hf_ddtree.disable(model)
    plain = generate(model, do_sample)
    drafter = make_drafter(model, plain)
    output = generate(hf_ddtree.enable(model), do_sample, assistant_model=drafter, **OPTIONS)
    assert output.sequences.tolist() == plain.tolist()
    assert len(set(plain[0].tolist())) > 16, "a repetitive output would hide faults"
    return output


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_plain_decoding(family, drafter, do_sample):
    output = assert_equal_to_plain(tiny_model(family), DRAFTERS[drafter], do_sample)
    if drafter == "scripted":
        assert output.tokens_per_round > 2.5, "long paths must have been accepted"


RECURRENT_DRAFTERS = {
    "prompt look-up": DRAFTERS["prompt look-up"],
    "causal LM": lambda target, sequence: tiny_model("llama"),
    "DFlash": DRAFTERS["DFlash"],
    "scripted": DRAFTERS["scripted"],
}
RECURRENT_CASES = [
    *((family, drafter) for family in GATED_DELTA_FAMILIES for drafter in RECURRENT_DRAFTERS),
    *((family, "scripted") for family in RECURRENT_FAMILIES),
    ("bamba", "DFlash"),
]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family, drafter", RECURRENT_CASES)
def test_generate_equals_plain_decoding_of_recurrent_targets(family, drafter, do_sample):
    output = assert_equal_to_plain(tiny_model(family), RECURRENT_DRAFTERS[drafter], do_sample)
    assert len(output.rounds) >= 10
    if drafter == "scripted":
        assert output.tokens_per_round > 2.5, "long paths must have been accepted"


WITH_SDPA = [family for family, fields in FAMILIES.items() if "attn_implementation" not in fields]


@pytest.mark.parametrize("family", WITH_SDPA)
def test_generate_equals_plain_decoding_with_eager_attention(family):
    model = tiny_model(family, attn_implementation="eager")
    assert_equal_to_plain(model, DRAFTERS["scripted"], do_sample=False)


class EveryOtherRound(ScriptedDrafter):
    """Drafts the root alone in every other round. The model then makes its own mask."""

    rounds = 0

    def draft(self, input_ids, tree_budget, max_depth):
        self.rounds += 1
        if self.rounds % 2:
            return DraftTree.chain([int(input_ids[0, -1])])
        return super().draft(input_ids, tree_budget, max_depth)


@pytest.mark.parametrize("family", [*FAMILIES, *GATED_DELTA_FAMILIES])
def test_generate_over_a_padded_prompt_alternates_rounds_with_and_without_a_draft(family):
    model, padding = tiny_model(family), 5
    mask = (torch.arange(PROMPT.shape[1]) >= padding).long()[None]
    plain = generate(model, True, attention_mask=mask)
    drafter = EveryOtherRound(plain[0, padding:].tolist())
    output = generate(hf_ddtree.enable(model), True, attention_mask=mask, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output.sequences, plain)
    assert {0} < {r.tree_size for r in output.rounds} and output.tokens_per_round > 1.5
