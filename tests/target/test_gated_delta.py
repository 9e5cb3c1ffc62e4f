"""Gated DeltaNet over a tree: against the rule token by token, and which calls reach the tree form."""

import random

import pytest
import torch
from helpers import random_ids
from transformers.models.qwen3_5 import modeling_qwen3_5

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.target.gated_delta import TreeStates, gated_delta_patches
from hf_ddtree.testing import GATED_DELTA_FAMILIES, ScriptedDrafter, tiny_model

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS = 2, 4, 8, 6, 5
NAMES = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def random_tree(seed: int, n: int) -> DraftTree:
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(node) for node in range(1, n))]
    return DraftTree.from_lists([0] * n, parents)


def inputs(n: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, n, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    value = torch.randn(1, n, VALUE_HEADS, VALUE_DIM, generator=generator)
    # decays from none to total within a few tokens, the range in which exp may overflow off the path
    g = -20 * torch.rand(1, n, VALUE_HEADS, generator=generator) ** 4
    beta = torch.rand(1, n, VALUE_HEADS, generator=generator)
    state = torch.randn(1, VALUE_HEADS, KEY_DIM, VALUE_DIM, generator=generator)
    return (query, key, value), {"g": g, "beta": beta}, state


@pytest.mark.parametrize("n", [1, 2, 9, 60])
def test_delta_rule_and_commit_equal_the_rule_token_by_token(n):
    tree = random_tree(n, n)
    states = TreeStates(tree)
    tensors, gates, state = inputs(n)
    settings = {"use_qk_l2norm_in_kernel": True}
    output, unchanged = states.delta_rule(*tensors, **gates, initial_state=state, **settings)
    assert torch.equal(unchanged, state)
    for node in range(n):
        path = tree.path_to(node)
        expected, final = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            *(x[:, path] for x in tensors),
            **{name: x[:, path] for name, x in gates.items()},
            initial_state=state,
            output_final_state=True,
            **settings,
        )
        # fp32 sums over paths of up to a dozen nodes
        torch.testing.assert_close(output[:, node], expected[:, -1], rtol=1e-4, atol=1e-5)
        committed = state.clone()
        states.commit([committed], path)
        torch.testing.assert_close(committed, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolve_runs_along_each_path(width, bias):
    n, tree = 12, random_tree(3, 12)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, CHANNELS, 4 + n, generator=generator)
    weight = torch.randn(CHANNELS, width, generator=generator)
    offset = torch.randn(CHANNELS, generator=generator) if bias else None
    output = TreeStates(tree).convolve(states, weight, offset, activation="silu")
    for node in range(n):
        columns = [*range(4), *(4 + ancestor for ancestor in tree.path_to(node))]
        expected = modeling_qwen3_5.causal_conv1d_fn(states[..., columns], weight, offset, activation="silu")
        torch.testing.assert_close(output[..., node], expected[..., -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", GATED_DELTA_FAMILIES)
def test_gated_delta_patches_finds_the_functions_of_the_modelling_file(family):
    assert {patch.name for patch in gated_delta_patches(tiny_model(family))} == set(NAMES)


def test_gated_delta_patches_is_empty_for_attention_models():
    assert gated_delta_patches(tiny_model("llama")) == []


def test_gated_delta_patches_pass_calls_without_a_tree_to_the_installed_kernels(monkeypatch):
    """The kernels of flash-linear-attention and causal-conv1d do not take the keyword of trees."""
    calls = []

    def strict(original):
        def kernel(*args, **kwargs):
            assert not {"ddtree"} & set(kwargs)
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return kernel

    for name in NAMES:
        monkeypatch.setattr(modeling_qwen3_5, name, strict(getattr(modeling_qwen3_5, name)))
    model = tiny_model("qwen3_5_text")
    prompt = random_ids(30)
    plain = model.generate(prompt, max_new_tokens=30, do_sample=False)
    hf_ddtree.enable(model)
    model.generate(prompt, max_new_tokens=2, tree_budget=4, do_sample=False)  # with the self-check
    calls.clear()
    drafter = ScriptedDrafter(plain[0].tolist())
    output = model.generate(prompt, assistant_model=drafter, tree_budget=8, max_new_tokens=30, do_sample=False)
    assert torch.equal(output, plain)
    assert set(calls) == {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}, "only the prefill calls them"
