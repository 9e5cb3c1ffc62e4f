"""Verifying a tree path by path: groups of paths, and what it leaves alone."""

import pytest
import torch
from helpers import generate, random_ids, scripted
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.target import path_verifier
from hf_ddtree.target.path_verifier import PathVerifier, is_path_by_path
from hf_ddtree.testing import FAMILIES, GATED_DELTA_FAMILIES, RECURRENT_FAMILIES, tiny_model

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over 4 layers
TAPS = (1, 3)
# leaves at depths 1 to 3, so that the paths of a group differ in length
TREE = DraftTree.from_lists(list(range(7, 16)), [-1, 0, 0, 0, 1, 2, 2, 4, 0])


@pytest.fixture
def verifier():
    """Return a verifier after 20 tokens, and the keyword arguments of its forwards."""
    model, tokens = tiny_model("lfm2"), random_ids(20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, cache=cache, use_cache=True)
    positions = torch.arange(21)[None]
    inputs = {"cache": cache, "attention_mask": None, "position_ids": positions, "use_cache": True}
    return PathVerifier(model, cache, TAPS), inputs


@pytest.mark.parametrize("max_paths, n_forwards", [(1, 5), (2, 3), (16, 1)])
@torch.no_grad()
def test_verify_equals_each_nodes_own_chain_in_groups_of_every_size(verifier, max_paths, n_forwards, monkeypatch):
    monkeypatch.setattr(path_verifier, "MAX_PATHS", max_paths)
    verifier, inputs = verifier
    calls = []
    handle = verifier.model.register_forward_hook(lambda *_: calls.append(1))
    outputs = verifier.verify(TREE, inputs)
    handle.remove()
    assert len(calls) == n_forwards
    for node in range(len(TREE)):
        chain = torch.cat([random_ids(20)[0], TREE.token_ids[TREE.path_to(node)]])[None]
        expected = verifier.model(input_ids=chain, output_hidden_states=True)
        torch.testing.assert_close(outputs.logits[0, node], expected.logits[0, -1], **TOLERANCE)
        for tap in TAPS:
            state = outputs.hidden_states[tap][0, node]
            torch.testing.assert_close(state, expected.hidden_states[tap][0, -1], **TOLERANCE)


@torch.no_grad()
def test_verify_returns_a_new_output_each_time(verifier):
    verifier, inputs = verifier
    first = verifier.verify(TREE, inputs)
    logits = first.logits.clone()
    second = verifier.verify(DraftTree.chain([5, 6]), inputs)
    assert first is not second and torch.equal(first.logits, logits) and second.logits.shape[1] == 2
    assert first.cache is second.cache is inputs["cache"]


@torch.no_grad()
def test_verify_leaves_the_cache_alone_and_commit_extends_it(verifier):
    verifier, inputs = verifier
    verifier.verify(TREE, inputs)
    assert inputs["cache"].get_seq_length() == 20
    verifier.commit([0, 1, 4])
    assert inputs["cache"].get_seq_length() == 23
    outputs = verifier.verify(DraftTree.chain([7]), {**inputs, "position_ids": torch.arange(24)[None]})
    chain = torch.cat([random_ids(20)[0], TREE.token_ids[[0, 1, 4]], torch.tensor([7])])[None]
    torch.testing.assert_close(outputs.logits[0, 0], verifier.model(input_ids=chain).logits[0, -1], **TOLERANCE)


def test_commit_refuses_to_run_before_a_tree_was_verified(verifier):
    with pytest.raises(RuntimeError, match="verified before"):
        verifier[0].commit([0])


@pytest.mark.parametrize("family", [*FAMILIES, *GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES])
def test_is_path_by_path_only_for_states_without_a_tree_form(family):
    model = tiny_model(family)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    assert is_path_by_path(model, cache) == (family in RECURRENT_FAMILIES)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_verify_copies_a_cache_that_was_filled_while_gradients_were_on(family):
    """deepcopy refuses tensors that are results in a graph."""
    model, prompt = hf_ddtree.enable(tiny_model(family)), random_ids(20)
    outputs = []
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        with torch.enable_grad():
            model(input_ids=prompt[:, :12], cache=cache, use_cache=True)
        tree = {"assistant_model": scripted(outputs[0]), "tree_budget": 12} if outputs else {}
        outputs.append(generate(model, prompt, max_new_tokens=8, cache=cache, **tree))
    assert outputs[1].tolist() == outputs[0].tolist()
