"""Which drafter serves a call."""

import pytest
from helpers import assert_refused, generate, random_ids, scripted
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import TreeConfig
from hf_ddtree.drafters.causal_lm import CausalLMDrafter
from hf_ddtree.drafters.choose import choose_drafter
from hf_ddtree.drafters.dflash import DFlashDrafter
from hf_ddtree.drafters.prompt_lookup import PromptLookupDrafter
from hf_ddtree.enable import resolve_request
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT = random_ids(24, seed=1)


@pytest.fixture(scope="module")
def target():
    return hf_ddtree.enable(tiny_model("llama"))


def request(**settings):
    defaults = {"do_sample": True, "temperature": 0.5, "max_length": 40}
    return resolve_request(TreeConfig(tree_budget=8), GenerationConfig(**{**defaults, **settings}))


@pytest.mark.parametrize(
    "make_model, expected",
    [
        (tiny_dflash_drafter, DFlashDrafter),
        (tiny_muse_glimmer_drafter, DFlashDrafter),
        (lambda target: tiny_model("llama", seed=1), CausalLMDrafter),
        (lambda target: target, CausalLMDrafter),
    ],
    ids=["DFlash", "Muse Glimmer", "causal LM", "itself"],
)
def test_choose_drafter_wraps_a_model_by_its_kind(target, make_model, expected):
    model, asked = make_model(target), request()
    drafter = choose_drafter(model, target, asked)
    assert type(drafter) is expected and drafter.model is model
    assert drafter.sampling.policy is asked.policy and drafter.sampling.warpers is asked.warpers


def test_choose_drafter_without_a_model_looks_up_in_the_prompt(target):
    drafter = choose_drafter(None, target, request(prompt_lookup_num_tokens=7, max_matching_ngram_size=3))
    assert type(drafter) is PromptLookupDrafter and (drafter.max_depth, drafter.max_match) == (7, 3)


def test_choose_drafter_marks_an_object_as_used(target):
    """So a second call, in which the object's state would be wrong, is refused."""
    drafter = scripted(generate(target, PROMPT, max_new_tokens=4, do_sample=False))
    assert choose_drafter(drafter, target, request()) is drafter and drafter.used
    options = {"max_new_tokens": 4, "assistant_model": drafter, "tree_budget": 4}
    assert_refused("assistant_model: a drafter object serves one generate call", target.generate, PROMPT, **options)
