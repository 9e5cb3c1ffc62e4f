"""What the wrappers of private transformers names do. test_transformers_surface.py checks that the names are there."""

import pytest
import torch
from helpers import random_ids
from transformers import AttentionInterface, DynamicCache

from hf_ddtree import _transformers
from hf_ddtree.testing import tiny_model

PROMPT = random_ids(9)


@torch.no_grad()
def cache_after_prompt(model) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=PROMPT, cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next", "lfm2"])
def test_cached_tokens_is_an_int_whatever_the_first_layer_is(family):
    """The first layer of the last two families is recurrent."""
    n_tokens = _transformers.cached_tokens(cache_after_prompt(tiny_model(family)))
    assert type(n_tokens) is int and n_tokens == PROMPT.shape[1]


def test_cached_tokens_of_an_empty_cache_is_zero():
    assert _transformers.cached_tokens(DynamicCache()) == 0


@torch.no_grad()
def test_crop_rows_drops_rows_and_keeps_recurrent_states():
    model = tiny_model("qwen3_next")
    cache = cache_after_prompt(model)
    recurrent, attention = cache.layers[:2]
    with _transformers.past_recording(cache):
        model(input_ids=random_ids(3, seed=1), cache=cache, use_cache=True)
        states = {index: state.clone() for index, state in recurrent.recurrent_states.items()}
        rows = attention.keys.clone()
        for layer in cache.layers:
            _transformers.crop_rows(layer, 2)
    assert states and all(torch.equal(recurrent.recurrent_states[index], state) for index, state in states.items())
    assert torch.equal(attention.keys, rows[..., :-2, :])


@pytest.mark.parametrize("family", ["mistral", "qwen3_next"])
def test_past_recording_ends_with_the_context(family):
    cache = cache_after_prompt(tiny_model(family))
    layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    before = [layer.record_past for layer in layers]
    with pytest.raises(KeyboardInterrupt), _transformers.past_recording(cache):
        assert layers and all(layer.record_past for layer in layers)
        raise KeyboardInterrupt
    assert [layer.record_past for layer in layers] == before == [False] * len(layers)


def test_attention_functions_are_those_that_layers_look_up():
    functions = _transformers.attention_functions()
    before = functions["sdpa"]

    def other(*args, **kwargs):
        raise AssertionError("it is only looked up")

    functions["sdpa"] = other
    try:
        assert AttentionInterface().get_interface("sdpa", None) is other
    finally:
        functions["sdpa"] = before


def test_attention_implementation_is_the_name_of_the_function():
    for name in ("sdpa", "eager"):
        assert _transformers.attention_implementation(tiny_model("llama", attn_implementation=name).config) == name


@torch.no_grad()
def test_logits_to_keep_limits_a_forward_to_the_last_logits():
    model = tiny_model("llama")
    expected = model(input_ids=PROMPT).logits[:, -2:]
    kept = model(input_ids=PROMPT, **_transformers.logits_to_keep(model, 2)).logits
    assert kept.shape[1] == 2
    torch.testing.assert_close(kept, expected)


@torch.no_grad()
def test_extend_model_kwargs_makes_room_for_n_tokens():
    model = tiny_model("llama")
    outputs = model(input_ids=PROMPT)
    positions, mask = torch.arange(9)[None], torch.ones(1, 9, dtype=torch.long)
    extended = _transformers.extend_model_kwargs(model, outputs, {"position_ids": positions, "attention_mask": mask}, 3)
    assert extended["attention_mask"].tolist() == [[1] * 12]
    assert int(extended["position_ids"][0, -1]) == 11


def test_default_generation_settings_fill_in_what_is_unset():
    model = tiny_model("llama")
    assert model.generation_config.num_assistant_tokens is None
    defaults = _transformers.default_generation_settings(model.generation_config)
    assert defaults["num_assistant_tokens"] > 0 and 0 < defaults["assistant_confidence_threshold"] < 1
