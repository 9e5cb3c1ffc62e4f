"""Token-equality with plain decoding for every target family, attention implementation and kind of drafter."""

import pytest
import torch

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.testing import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    RECURRENT_FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    ScriptedDrafter,
    tiny_dflash_drafter,
    tiny_model,
    tiny_muse_glimmer_drafter,
)

NEW_TOKENS = 64
DRAFTERS = {
    "prompt look-up": lambda target, script: None,
    "causal LM": lambda target, script: target,
    "DFlash": lambda target, script: tiny_dflash_drafter(target),
    "Muse Glimmer": lambda target, script: tiny_muse_glimmer_drafter(target),
    "scripted": lambda target, script: ScriptedDrafter(script),
}


def generate(model, prompt, do_sample, **kwargs):
    torch.manual_seed(5)
    settings = {"do_sample": True, "temperature": 0.8} if do_sample else {"do_sample": False}
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, **settings, **kwargs)


def assert_equal_to_plain(model, make_drafter, do_sample):
    """The context passes the window from the first round on."""
    hf_ddtree.disable(model)
    prompt = torch.randint(4, VOCAB_SIZE, (1, WINDOW + 8), generator=torch.Generator().manual_seed(1))
    plain = generate(model, prompt, do_sample)
    drafter = make_drafter(model, plain[0].tolist())
    hf_ddtree.enable(model)
    output = generate(
        model,
        prompt,
        do_sample,
        assistant_model=drafter,
        tree_budget=12,
        tree_sampling="target",  # the policy that keeps to plain sampling's random numbers
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist()
    assert len(set(plain[0].tolist())) > 16, "a repetitive output would hide faults"
    return output


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_decoding(family, drafter, do_sample):
    output = assert_equal_to_plain(tiny_model(family), DRAFTERS[drafter], do_sample)
    if drafter == "scripted":
        assert output.tokens_per_round > 2.5, "long paths must have been accepted"


RECURRENT_DRAFTERS = {
    "prompt look-up": DRAFTERS["prompt look-up"],
    "causal LM": lambda target, script: tiny_model("llama"),
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
def test_recurrent_targets_equal_plain_decoding(family, drafter, do_sample):
    output = assert_equal_to_plain(tiny_model(family), RECURRENT_DRAFTERS[drafter], do_sample)
    assert len(output.rounds) >= 10
    if drafter == "scripted":
        assert output.tokens_per_round > 2.5, "long paths must have been accepted"


WITH_SDPA = [family for family, fields in FAMILIES.items() if "attn_implementation" not in fields]


@pytest.mark.parametrize("family", WITH_SDPA)
def test_equals_plain_decoding_with_eager_attention(family):
    model = tiny_model(family, attn_implementation="eager")
    assert_equal_to_plain(model, DRAFTERS["scripted"], do_sample=False)


class EveryOtherRound(ScriptedDrafter):
    """Between two trees the root alone, for which the model makes its own mask."""

    rounds = 0

    def get_candidates(self, input_ids, tree_budget, max_depth):
        self.rounds += 1
        if self.rounds % 2:
            return DraftTree.from_lists([int(input_ids[0, -1])], [-1])
        return super().get_candidates(input_ids, tree_budget, max_depth)


@pytest.mark.parametrize("family", [*FAMILIES, *GATED_DELTA_FAMILIES])
def test_rounds_without_a_draft_between_others_over_a_padded_prompt(family):
    model, padding = tiny_model(family), 5
    prompt = torch.randint(4, VOCAB_SIZE, (1, WINDOW + 8), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(prompt.shape[1]) >= padding).long()[None]
    plain = generate(model, prompt, True, attention_mask=mask)
    drafter = EveryOtherRound(plain[0, padding:].tolist())
    options = {"tree_budget": 12, "tree_sampling": "target", "return_dict_in_generate": True}
    output = generate(hf_ddtree.enable(model), prompt, True, attention_mask=mask, assistant_model=drafter, **options)
    assert torch.equal(output.sequences, plain)
    assert {0} < {r.tree_size for r in output.rounds} and output.tokens_per_round > 1.5
