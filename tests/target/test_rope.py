"""Frequencies that change with the longest position: requests around the change give plain decoding's tokens."""

import pytest
import torch
from helpers import assert_refused, generate, random_ids, tree_arguments

import hf_ddtree
from hf_ddtree.target.rope import frequency_changes
from hf_ddtree.testing import tiny_model

CHANGE = 24  # tokens. Beyond them, the models below have other frequencies.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": CHANGE,
}


MODELS = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": CHANGE}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": CHANGE}),
    # Phi-3 runs the text again at the change. A llama goes on with the keys that it has.
    "longrope that keeps its cache": ("llama", {"rope_parameters": LONGROPE}),
}


def changing_model(name: str):
    family, fields = MODELS[name]
    return hf_ddtree.enable(tiny_model(family, **fields))


def prompt_at(first: int, padding: int, length: int = 12) -> tuple[torch.Tensor, dict]:
    """Return a prompt whose first token stands at a position, left-padded, and the arguments that say so."""
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(length)], dim=1)
    mask = (torch.arange(length + padding) >= padding).long()[None]
    return ids, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0) + first}


def test_frequency_changes_of_one_rope_and_by_layer_type():
    assert frequency_changes(changing_model("longrope").config) == {"longrope": CHANGE}
    assert frequency_changes(changing_model("dynamic").config) == {"dynamic": CHANGE}
    assert frequency_changes(tiny_model("gpt2").config) == {}
    nested = tiny_model("gemma3_text").config
    nested.rope_parameters = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}
    assert frequency_changes(nested) == {"dynamic": nested.max_position_embeddings}


@pytest.mark.parametrize("padding", [0, 4, 20])
@pytest.mark.parametrize("first", [0, 3, 11, 12, 13, 30])
@pytest.mark.parametrize("name", MODELS)
def test_check_rope_refuses_exactly_the_requests_that_cross_a_change(name, first, padding):
    """Positions decide. Padding has none, and the last emitted token does not run."""
    model, (ids, inputs) = changing_model(name), prompt_at(first, padding)
    fits = CHANGE - 12 - first + 1  # new tokens before the change
    last_of_prompt = first + 11
    if name != "dynamic" and last_of_prompt >= CHANGE:
        fits = 30
    if fits > 0:
        plain = generate(model, ids, max_new_tokens=fits, **inputs)
        arguments = tree_arguments("scripted", model, plain[:, padding:])
        assert generate(model, ids, max_new_tokens=fits, **inputs, **arguments).tolist() == plain.tolist()
    if fits < 30:
        crossing = {"max_new_tokens": max(fits, 0) + 1, **inputs, "tree_budget": 8}
        assert_refused(f"max_new_tokens.*position {CHANGE} on.*RoPE", model.generate, ids, **crossing)
