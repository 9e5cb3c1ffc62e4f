"""Token equality with plain decoding, for every target family, attention implementation and kind of drafter."""

import pytest
import torch
from helpers import assert_close, assert_refused, random_ids, scripted
from helpers import generate as generate_seeded

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.testing import (
    FAMILIES,
    FURTHER_FAMILIES,
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


SOME_DRAFTERS = ["prompt look-up", "causal LM", "DFlash"]
# a second drafter for each of the further families, in rotation. The layers of Gemma 3n have no single hidden state.
FURTHER_CASES = [
    (family, "causal LM" if family.startswith("gemma3n") else SOME_DRAFTERS[i % 3])
    for i, family in enumerate(FURTHER_FAMILIES)
]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FURTHER_FAMILIES)
def test_generate_equals_plain_decoding_of_further_families(family, do_sample):
    output = assert_equal_to_plain(tiny_model(family), DRAFTERS["scripted"], do_sample)
    assert output.tokens_per_round > 2.5, "long paths must have been accepted"


@pytest.mark.parametrize("family, drafter", FURTHER_CASES)
def test_generate_equals_plain_decoding_of_further_families_with_another_drafter(family, drafter):
    assert_equal_to_plain(tiny_model(family), DRAFTERS[drafter], do_sample=True)


SHARED_KV = ["gemma3n_shared", "gemma4_shared"]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("family", [*SHARED_KV, "gemma3n_text"])
def test_generate_returns_the_states_and_the_cache_of_layers_that_share_keys(family, padding):
    """The layers that share another layer's keys have no rows. Those of Gemma 3n have several states per token."""
    model, mask = hf_ddtree.enable(tiny_model(family)), (torch.arange(PROMPT.shape[1]) >= padding).long()[None]
    settings = {"attention_mask": mask, "output_hidden_states": True}
    plain = generate(model, False, return_dict_in_generate=True, **settings)
    drafter = scripted(plain.sequences[:, padding:])
    tree = generate(model, False, assistant_model=drafter, **settings, **OPTIONS)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    for states, expected in zip(tree.hidden_states, plain.hidden_states, strict=True):
        for state, expected_state in zip(states, expected, strict=True):
            assert_close(state, expected_state)
    for layer, expected_layer in zip(tree.cache.layers, plain.cache.layers, strict=True):
        assert type(layer) is type(expected_layer)
        assert (layer.keys is None) == (expected_layer.keys is None)
        assert layer.keys is None or layer.keys.shape == expected_layer.keys.shape


def test_generate_goes_on_from_a_cache_of_layers_that_share_keys():
    for family in SHARED_KV:
        model, texts = hf_ddtree.enable(tiny_model(family)), []
        for options in ({}, {"tree_budget": 8, "assistant_model": model}):
            first = model.generate(PROMPT, max_new_tokens=20, return_dict_in_generate=True, **options)
            second = torch.cat([first.sequences, random_ids(6, seed=2)], dim=1)
            texts.append(model.generate(second, cache=first.cache, max_new_tokens=20, **options).tolist())
        assert texts[0] == texts[1]


def test_generate_verifies_layers_that_share_keys_with_the_kernel():
    model = hf_ddtree.enable(tiny_model("gemma4_shared"))
    plain = model.generate(PROMPT, max_new_tokens=4)
    options = {"assistant_model": scripted(plain), "tree_budget": 4, "tree_attention": "triton"}
    assert model.generate(PROMPT, max_new_tokens=4, **options).tolist() == plain.tolist()


def test_check_dflash_refuses_a_target_whose_layers_have_several_states():
    model = hf_ddtree.enable(tiny_model("gemma3n_shared"))
    options = {"assistant_model": tiny_dflash_drafter(model), "tree_budget": 8}
    assert_refused("assistant_model.*AltUp.*causal LM", model.generate, PROMPT, **options)


def test_check_model_refuses_alibi():
    assert_refused("model: .*ALiBi", hf_ddtree.enable, tiny_model("falcon", alibi=True))


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
