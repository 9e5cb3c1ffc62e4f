"""The request of a call: a frozen object that holds what the settings said."""

import dataclasses
import sys

import pytest
import torch
from helpers import generate, random_ids
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import POLICIES, TreeConfig
from hf_ddtree.enable import resolve_request
from hf_ddtree.request import DEFAULT_LOOKUP_DEPTH, DEFAULT_LOOKUP_MATCH, TREE_OPTIONS, Request
from hf_ddtree.testing import tiny_model

GREEDY = {"do_sample": False, "temperature": 0.7, "top_k": 5, "max_length": 40}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_length": 40}
KEPT = ("keep_scores", "keep_logits", "keep_hidden_states")
OUTPUTS = {"output_scores": True, "output_logits": True, "output_hidden_states": True}


def resolve(tree_options=None, **settings) -> Request:
    return resolve_request(TreeConfig(**{"tree_budget": 8, **(tree_options or {})}), GenerationConfig(**settings))


def test_tree_options_are_the_fields_of_tree_config():
    assert tuple(field.name for field in dataclasses.fields(TreeConfig)) == TREE_OPTIONS


def test_resolve_request_returns_a_frozen_request():
    request = resolve(**GREEDY)
    for field in dataclasses.fields(Request):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(request, field.name, getattr(request, field.name))


def test_resolve_request_takes_over_the_tree_options():
    options = {"tree_budget": "auto", "tree_attention": "sdpa", "tree_trace": True, "tree_timing": True}
    request = resolve(options, **GREEDY)
    taken = (request.tree_budget, request.tree_attention, request.trace, request.timing)
    assert taken == ("auto", "sdpa", True, True)
    plain = resolve(**GREEDY)
    assert (plain.tree_budget, plain.tree_attention, plain.trace, plain.timing) == (8, "auto", False, False)


@pytest.mark.parametrize("name", POLICIES)
def test_resolve_request_of_greedy_decoding_draws_nothing(name):
    """Whatever sampling settings are around, as in plain greedy decoding."""
    request = resolve({"tree_sampling": name}, **GREEDY)
    assert request.do_sample is False and request.temperature == 0.0
    assert request.policy is POLICIES["target"] and list(request.warpers) == []


@pytest.mark.parametrize("name", POLICIES)
def test_resolve_request_of_sampling_keeps_policy_temperature_and_warpers(name):
    request = resolve({"tree_sampling": name}, **SAMPLED)
    assert request.do_sample is True and request.temperature == 0.7
    assert request.policy is POLICIES[name]
    names = [type(warper).__name__ for warper in request.warpers]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"]


def test_resolve_request_leaves_out_warpers_that_change_nothing():
    request = resolve(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_length=40)
    assert list(request.warpers) == [] and request.temperature == 1.0


@torch.no_grad()
def test_resolve_request_has_the_warpers_of_plain_sampling():
    """Their result on logits is that of transformers' own processors."""
    model, logits = tiny_model("llama"), torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    settings = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
    seen = []

    def keep(input_ids, scores):
        seen.append(scores.clone())
        return logits.clone()

    output = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    plain = generate(model, random_ids(5), do_sample=True, logits_processor=[keep], **settings, **output)
    warped = resolve(do_sample=True, max_length=40, **settings).warpers(None, logits.clone())
    assert len(seen) == 1 and torch.equal(plain.scores[0], warped)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("asked", [*OUTPUTS, None])
@pytest.mark.parametrize("return_dict", [None, False, True])
def test_resolve_request_keeps_outputs_only_if_they_are_returned(settings, asked, return_dict):
    request = resolve(**settings, return_dict_in_generate=return_dict, **({asked: True} if asked else {}))
    assert request.return_dict is bool(return_dict)
    expected = [bool(return_dict) and asked == name for name in OUTPUTS]
    assert [getattr(request, name) for name in KEPT] == expected


def test_resolve_request_of_all_outputs_keeps_all():
    request = resolve(**SAMPLED, return_dict_in_generate=True, **OUTPUTS)
    assert request.return_dict and all(getattr(request, name) for name in KEPT)


def test_resolve_request_holds_lengths_and_the_look_up():
    request = resolve(**GREEDY)
    assert request.max_length == 40
    assert (request.lookup_depth, request.lookup_match) == (DEFAULT_LOOKUP_DEPTH, DEFAULT_LOOKUP_MATCH)
    request = resolve(**GREEDY, prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    assert (request.lookup_depth, request.lookup_match) == (3, 2)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_generate_resolves_the_request_that_its_settings_describe(do_sample, monkeypatch):
    """The settings as transformers prepared them: `max_new_tokens` has become a length, unset values are filled in."""
    model, resolved = hf_ddtree.enable(tiny_model("llama")), []

    def spy(tree_config, settings):
        resolved.append(resolve_request(tree_config, settings))
        return resolved[-1]

    # the module, because the function of this name hides it
    monkeypatch.setattr(sys.modules["hf_ddtree.enable"], "resolve_request", spy)
    settings = {"max_new_tokens": 6, "do_sample": do_sample, "temperature": 0.5, "top_k": 0}
    generate(model, random_ids(10), tree_budget=4, tree_sampling="swor", **settings)
    [request] = resolved
    assert (request.tree_budget, request.max_length, request.do_sample) == (4, 16, do_sample)
    assert request.policy is POLICIES["swor" if do_sample else "target"]
    assert request.temperature == (0.5 if do_sample else 0.0) and len(request.warpers) == int(do_sample)
    assert not request.return_dict
