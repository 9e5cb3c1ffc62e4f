"""The hidden states of the prompt that the drafter reads."""

import threading

import pytest
import torch
from helpers import random_ids
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from hf_ddtree.target.prefill import prefill, tap, text_positions
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over 4 layers
TAPS = (1, 3)


def prompt_inputs(length: int, padding: int = 0) -> dict:
    mask = (torch.arange(length) >= padding).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    mask = mask if padding else None
    return {"cache": DynamicCache(), "attention_mask": mask, "position_ids": positions, "use_cache": True}


@pytest.mark.parametrize("chunk_size", [None, 1, 5, 100])
@torch.no_grad()
def test_prefill_returns_the_states_of_all_prompt_tokens(chunk_size):
    model = tiny_model("llama")
    taps = tuple(layer + 1 for layer in tiny_dflash_drafter(model).config.target_layer_ids)
    prompt = random_ids(12)
    settings = model.generation_config
    settings.prefill_chunk_size = chunk_size
    inputs = {**prompt_inputs(12, padding=2), "logits_to_keep": 1}
    outputs, states, positions = prefill(model, prompt, settings, inputs, taps)
    expected = model(input_ids=prompt[:, 2:], output_hidden_states=True).hidden_states
    torch.testing.assert_close(states, torch.cat([expected[tap] for tap in taps], -1), **TOLERANCE)
    assert positions.tolist() == [list(range(10))]
    assert outputs.logits.shape[1] == 1


@pytest.mark.parametrize("taps", [(), TAPS], ids=["no-taps", "taps"])
@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("n_cached", [0, 4])
@torch.no_grad()
def test_prefill_counts_the_tokens_that_ran_without_padding(taps, chunk_size, n_cached):
    model, prompt, inputs = tiny_model("llama"), random_ids(12), prompt_inputs(12, padding=2)
    settings = model.generation_config
    settings.prefill_chunk_size = chunk_size
    if n_cached:
        cached = {name: inputs[name][:, :n_cached] for name in ("attention_mask", "position_ids")}
        model(input_ids=prompt[:, :n_cached], cache=inputs["cache"], use_cache=True, **cached)
    _, states, positions = prefill(model, prompt, settings, {**inputs, "logits_to_keep": 1}, taps)
    expected = list(range(max(0, n_cached - 2), 10))
    assert positions.tolist() == [expected]
    assert states.shape == (1, len(expected), 32 * len(taps))


@torch.no_grad()
def test_prefill_ignores_forwards_of_other_threads():
    model, prompt, started = tiny_model("llama"), random_ids(6), []

    def generate_elsewhere(module, args, kwargs):
        if not started:
            started.append(threading.Thread(target=lambda: model(random_ids(3), output_hidden_states=True)))
            started[0].start()
            started[0].join()

    handle = model.register_forward_pre_hook(generate_elsewhere, with_kwargs=True)
    _, states, _ = prefill(model, prompt, model.generation_config, prompt_inputs(6), TAPS)
    handle.remove()
    assert started and states.shape[1] == 6


def test_tap_returns_the_wanted_rows_side_by_side():
    states = tuple(torch.full((1, 4, 2), float(layer)) + torch.arange(4)[None, :, None] for layer in (0, 10, 20, 30))
    outputs = CausalLMOutput(logits=torch.zeros(1, 4, 5), hidden_states=states)
    assert tap(outputs, TAPS, rows=[3, 1]).tolist() == [[[13, 13, 33, 33], [11, 11, 31, 31]]]
    assert tap(outputs, (), rows=[3, 1]).shape == (1, 2, 0)


def test_tap_refuses_a_target_without_hidden_states():
    with pytest.raises(ValueError, match=r"assistant_model: .*hidden states"):
        tap(CausalLMOutput(logits=torch.zeros(1, 4, 5)), TAPS)


def test_text_positions_are_the_first_of_several():
    rows = torch.arange(12).view(3, 1, 4)
    assert text_positions(rows).tolist() == text_positions(rows[0]).tolist() == [[0, 1, 2, 3]]
