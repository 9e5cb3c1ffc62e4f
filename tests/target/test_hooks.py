"""Hooks and functions of the user that come after the self-check has passed: refused, or the text equals plain."""

import pytest
import torch
from helpers import assert_refused, random_ids, scripted
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

import hf_ddtree
from hf_ddtree.target import selfcheck
from hf_ddtree.testing import VOCAB_SIZE, tiny_model

PROMPT = random_ids(10)
PLACES = ["", "model", "model.layers.1", "model.layers.1.self_attn", "lm_head"]
FIRST_TENSOR = ("logits", "last_hidden_state", "hidden_states", "inputs_embeds", "input_ids")


def steered(states: torch.Tensor, newest_only: bool) -> torch.Tensor:
    """Return `[1, n, H]` with a vector added, or token ids `[1, n]` with 1 added, to all positions or the newest."""
    states, rows = states.clone(), slice(-1, None) if newest_only else slice(None)
    if states.is_floating_point():
        states[:, rows] += torch.randn(states.shape[-1], generator=torch.Generator("cpu").manual_seed(0))
    else:
        states[:, rows] = (states[:, rows] + 1) % VOCAB_SIZE
    return states


def with_steering(values, newest_only: bool):
    """Return the arguments or the outputs of a module with the first tensor steered."""
    if isinstance(values, torch.Tensor):
        return steered(values, newest_only)
    if isinstance(values, tuple):
        return (steered(values[0], newest_only), *values[1:])
    name = next(name for name in FIRST_TENSOR if values.get(name) is not None)
    values[name] = steered(values[name], newest_only)
    return values


def hook(module, args, output, newest_only):
    return with_steering(output, newest_only)


def hook_with_kwargs(module, args, kwargs, output, newest_only):
    return with_steering(output, newest_only)


def pre_hook(module, args, newest_only):
    return with_steering(args, newest_only)


def pre_hook_with_kwargs(module, args, kwargs, newest_only):
    return (with_steering(args, newest_only), kwargs) if args else (args, with_steering(kwargs, newest_only))


KINDS = {
    "hook": lambda module, call: module.register_forward_hook(call(hook)),
    "hook with kwargs": lambda module, call: module.register_forward_hook(call(hook_with_kwargs), with_kwargs=True),
    "pre-hook": lambda module, call: module.register_forward_pre_hook(call(pre_hook)),
    "pre-hook with kwargs": lambda module, call: module.register_forward_pre_hook(
        call(pre_hook_with_kwargs), with_kwargs=True
    ),
}
# A pre-hook without kwargs sees no tensor where a module is called by keywords alone.
CASES = [
    (kind, place) for kind in KINDS for place in PLACES if kind != "pre-hook" or place in ("model.layers.1", "lm_head")
]


def register(model, kind: str, place: str, newest_only: bool):
    return KINDS[kind](
        model.get_submodule(place), lambda function: lambda *args: function(*args, newest_only=newest_only)
    )


def plain(model) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False)


def tree(model, sequence) -> torch.Tensor:
    options = {"max_new_tokens": 8, "do_sample": False, "tree_budget": 6}
    return model.generate(PROMPT, assistant_model=scripted(sequence), **options)


@pytest.fixture(scope="module")
def checked():
    """Return a model for which the self-check has passed, and its plain text."""
    model = hf_ddtree.enable(tiny_model("llama", num_hidden_layers=2))
    sequence = plain(model)
    assert torch.equal(tree(model, sequence), sequence)
    return model, sequence


@pytest.mark.parametrize("kind, place", CASES)
def test_generate_refuses_a_hook_that_changes_the_newest_position(checked, monkeypatch, kind, place):
    model, sequence = checked
    handle = register(model, kind, place, newest_only=True)
    try:
        assert_refused("model: .*token by token.*let it change all positions", tree, model, sequence)
    finally:
        handle.remove()
    monkeypatch.setattr(selfcheck, "_measure", None)  # the state from before the hook is remembered
    assert torch.equal(tree(model, sequence), sequence)


@pytest.mark.parametrize("kind, place", CASES)
def test_generate_equals_plain_under_a_hook_that_changes_every_position(checked, kind, place):
    model, unsteered = checked
    handle = register(model, kind, place, newest_only=False)
    try:
        expected = plain(model)
        assert not torch.equal(expected, unsteered)
        assert torch.equal(tree(model, expected), expected)
    finally:
        handle.remove()


@pytest.mark.parametrize("place", PLACES)
def test_generate_takes_a_hook_that_only_records(checked, place):
    model, expected = checked
    seen = []
    handle = model.get_submodule(place).register_forward_hook(lambda *_: seen.append(1))
    try:
        assert torch.equal(tree(model, expected), expected) and seen
    finally:
        handle.remove()


def with_larger_values(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, 1.5 * value, attention_mask, **kwargs)


def test_generate_refuses_a_function_that_was_registered_as_sdpa(checked):
    """Plain decoding calls it, and a tree forward would not."""
    model, sequence = checked
    AttentionInterface.register("sdpa", with_larger_values)
    try:
        assert_refused("attn_implementation='sdpa' does not support tree decoding", tree, model, sequence)
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert torch.equal(tree(model, sequence), sequence)


def test_generate_checks_anew_a_function_that_all_models_share(checked):
    model, sequence = checked
    ALL_ATTENTION_FUNCTIONS["sdpa"] = with_larger_values
    try:
        expected = plain(model)
        assert not torch.equal(expected, sequence)
        assert torch.equal(tree(model, expected), expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_generate_refuses_an_eager_function_with_a_mask_of_its_own(monkeypatch):
    model = hf_ddtree.enable(tiny_model("gemma2", sliding_window=512))
    sequence, original = plain(model), modeling_gemma2.eager_attention_forward
    assert torch.equal(tree(model, sequence), sequence)

    def causal(module, query, key, value, attention_mask, **kwargs):
        hidden = torch.ones(query.shape[2], key.shape[2]).triu(key.shape[2] - query.shape[2] + 1)
        return original(module, query, key, value, hidden * torch.finfo(query.dtype).min, **kwargs)

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", causal)
    assert_refused("attn_implementation='eager' does not support tree decoding", tree, model, sequence)
