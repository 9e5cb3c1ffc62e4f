"""The reference of the kernel: its bits, its visibility and its sums against the definition, one number at a time."""

import math
import random

import pytest
import torch
from hf_ddtree.kernels.reference import pack_ancestors, tree_attention_reference, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree import DraftTree


def random_trees(n_nodes: int, n: int, seed: int = 0) -> list[DraftTree]:
    rng = random.Random(seed)
    parents = [[-1, *(rng.randrange(node) for node in range(1, n_nodes))] for _ in range(n)]
    return [DraftTree.from_lists([0] * n_nodes, row) for row in parents]


def tree_tensors(trees: list[DraftTree]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ancestor bits and the depths of trees of equal size."""
    ancestors = pack_ancestors(torch.stack([tree.ancestor_mask for tree in trees]))
    return ancestors, torch.stack([tree.depths for tree in trees]).int()


@pytest.mark.parametrize("n_nodes", [1, 63, 64, 65, 130])
def test_pack_ancestors_sets_one_bit_per_ancestor(n_nodes):
    [tree] = random_trees(n_nodes, 1)
    packed = pack_ancestors(tree.ancestor_mask[None])
    assert packed.shape == (1, n_nodes, math.ceil(n_nodes / 64)) and packed.dtype == torch.int64
    for node in range(n_nodes):
        words = [int(word) % 2**64 for word in packed[0, node]]  # bit 63 is the sign
        bits = {i for i in range(64 * len(words)) if words[i // 64] >> i % 64 & 1}
        assert bits == set(tree.path_to(node))


def sees(tree: DraftTree, node: int, key: int, prefix: int, first: int, window: int | None) -> bool:
    """Return whether a node sees a key, by the definition in the docstring of the reference."""
    depth = int(tree.depths[node])
    if key < prefix:
        return key >= first and (window is None or prefix + depth - key < window)
    other = key - prefix
    if other >= len(tree) or other not in tree.path_to(node):
        return False
    return window is None or depth - int(tree.depths[other]) < window


@settings(max_examples=60, deadline=None)
@given(
    n_nodes=st.integers(1, 70),
    prefixes=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    first=st.integers(0, 4),
    window=st.none() | st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_visible_keys_equals_the_definition(n_nodes, prefixes, first, window, seed):
    trees = random_trees(n_nodes, len(prefixes), seed)
    n_keys = max(prefixes) + n_nodes + 1
    first_valid = torch.full((len(prefixes),), first) if first else None
    visible = visible_keys(*tree_tensors(trees), torch.tensor(prefixes), n_keys, first_valid, window)
    for row, (tree, prefix) in enumerate(zip(trees, prefixes, strict=True)):
        for node in range(n_nodes):
            expected = [sees(tree, node, key, prefix, first, window) for key in range(n_keys)]
            assert visible[row, node].tolist() == expected


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_reference_equals_the_definition(softcap, has_sinks, window):
    generator = torch.Generator().manual_seed(0)
    n_nodes, prefix, first, n_heads, n_kv_heads = 6, 5, 2, 4, 2
    trees = random_trees(n_nodes, 1, seed=1)
    query = torch.randn(1, n_heads, n_nodes, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(1, n_kv_heads, prefix + n_nodes, 8, generator=generator, dtype=torch.float64)
    value = torch.randn(1, n_kv_heads, prefix + n_nodes, 3, generator=generator, dtype=torch.float64)
    sinks = torch.randn(n_heads, generator=generator, dtype=torch.float64) if has_sinks else None
    lengths, first_valid = torch.tensor([prefix]), torch.tensor([first])
    output = tree_attention_reference(
        query, key, value, *tree_tensors(trees), lengths, 0.4, first_valid, window, softcap, sinks
    )
    assert output.shape == (1, n_heads, n_nodes, 3)
    for head in range(n_heads):
        for node in range(n_nodes):
            total, weighted = float(sinks[head].exp()) if has_sinks else 0.0, torch.zeros(3, dtype=torch.float64)
            for i in range(prefix + n_nodes):
                if sees(trees[0], node, i, prefix, first, window):
                    score = 0.4 * float(query[0, head, node] @ key[0, head // 2, i])
                    score = softcap * math.tanh(score / softcap) if softcap else score
                    total, weighted = total + math.exp(score), weighted + math.exp(score) * value[0, head // 2, i]
            torch.testing.assert_close(output[0, head, node], weighted / total)


def test_tree_attention_reference_reads_no_key_that_nobody_sees():
    trees = random_trees(3, 1)
    states = torch.zeros(1, 1, 8, 4)
    states[:, :, 6:] = torch.nan
    states[:, :, :1] = torch.nan
    output = tree_attention_reference(
        torch.ones(1, 1, 3, 4), states, states, *tree_tensors(trees), torch.tensor([3]), 1.0, torch.tensor([1])
    )
    assert torch.equal(output, torch.zeros(1, 1, 3, 4))
