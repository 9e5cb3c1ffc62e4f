"""Verifying a tree in one forward: the inputs of the forward, and committing."""

from types import SimpleNamespace

import pytest
import torch
from helpers import random_ids
from transformers import DynamicCache

from hf_ddtree import DraftTree
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.cache import uncommitted_rows
from hf_ddtree.target.tree_verifier import TreeVerifier, forward_inputs
from hf_ddtree.testing import tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over 4 layers
TREE = DraftTree.from_lists([7, 8, 9, 10], [-1, 0, 0, 2])


def prefilled(model, tokens: torch.Tensor) -> dict:
    """Return the keyword arguments of the forward after some tokens, `[1, L]`."""
    cache, positions = DynamicCache(config=model.config), torch.arange(tokens.shape[1] + 1)[None]
    model(input_ids=tokens, cache=cache, use_cache=True)
    return {"cache": cache, "attention_mask": None, "position_ids": positions, "use_cache": True}


@torch.no_grad()
def test_verify_runs_one_forward_over_all_nodes(monkeypatch):
    model, tokens = tiny_model("llama"), random_ids(20)
    inputs, shapes, forward = prefilled(model, tokens), [], type(model).forward

    def spy(self, **kwargs):
        shapes.append((tuple(kwargs["input_ids"].shape), kwargs["position_ids"].tolist()))
        return forward(self, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    with uncommitted_rows(inputs["cache"]) as committed:
        outputs = TreeVerifier(model, inputs["cache"], MaskedForward, (2,), committed).verify(TREE, inputs)
    assert shapes == [((1, 4), [[20, 21, 21, 22]])]
    assert outputs.logits.shape[1] == outputs.hidden_states[2].shape[1] == 4


@torch.no_grad()
def test_verify_leaves_the_arguments_of_the_caller_alone():
    model = tiny_model("llama")
    inputs = prefilled(model, random_ids(20))
    before = dict(inputs)
    with uncommitted_rows(inputs["cache"]) as committed:
        TreeVerifier(model, inputs["cache"], MaskedForward, (), committed).verify(TREE, inputs)
    assert inputs.keys() == before.keys() and all(inputs[name] is before[name] for name in before)


@torch.no_grad()
def test_commit_counts_the_committed_tokens():
    model = tiny_model("mistral")
    inputs = prefilled(model, random_ids(20))
    with uncommitted_rows(inputs["cache"]) as committed:
        verifier = TreeVerifier(model, inputs["cache"], MaskedForward, (), committed)
        verifier.verify(TREE, inputs)
        assert committed.length == 20
        verifier.commit([0, 2, 3])
        assert committed.length == inputs["cache"].get_seq_length() == 23


def test_commit_refuses_to_run_before_a_tree_was_verified():
    verifier = TreeVerifier(tiny_model("llama"), DynamicCache(), MaskedForward, (), SimpleNamespace(length=0))
    with pytest.raises(RuntimeError, match="verified before"):
        verifier.commit([0])


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
def test_forward_inputs_gives_every_node_the_last_token_type(name):
    inputs = forward_inputs(tiny_model("llama"), TREE.token_ids[None], {name: torch.tensor([[0, 0, 1]])}, ())
    assert inputs[name].tolist() == [[1, 1, 1, 1]]


def test_forward_inputs_asks_for_the_logits_of_all_nodes():
    inputs = forward_inputs(tiny_model("llama"), TREE.token_ids[None], {"logits_to_keep": 1}, ())
    assert inputs["logits_to_keep"] == 4
    assert "logits_to_keep" not in forward_inputs(tiny_model("llama"), TREE.token_ids[None], {}, ())


def test_forward_inputs_asks_for_tapped_states_unless_the_user_wants_all():
    model, node_ids = tiny_model("llama"), TREE.token_ids[None]
    assert forward_inputs(model, node_ids, {}, (1, 3))["output_hidden_states"] == [1, 3]
    assert forward_inputs(model, node_ids, {"output_hidden_states": True}, (1, 3))["output_hidden_states"] is True
    assert "output_hidden_states" not in forward_inputs(model, node_ids, {}, ())
