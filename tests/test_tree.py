"""build_tree against full enumeration, and the tree's own relations."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree import DraftTree, build_tree


def prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    """The token sequence from the root's child down to each node."""
    paths = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return paths[1:]


def enumerate_prefixes(draft_logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every prefix and its probability under the product of the marginals."""
    q = draft_logits.double().softmax(-1)
    depth, vocab_size = q.shape
    return {
        tokens: math.prod(float(q[d, token]) for d, token in enumerate(tokens))
        for n in range(1, depth + 1)
        for tokens in itertools.product(range(vocab_size), repeat=n)
    }


@settings(max_examples=150, deadline=None)
@given(
    depth=st.integers(1, 4),
    vocab_size=st.integers(1, 5),
    tree_budget=st.integers(1, 60),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_takes_the_most_probable_prefixes(depth, vocab_size, tree_budget, scale, seed):
    draft_logits = scale * torch.randn(depth, vocab_size, generator=torch.Generator().manual_seed(seed))
    tree = build_tree(draft_logits, tree_budget, root_token_id=7)
    drafted = prefixes(tree)
    probabilities = enumerate_prefixes(draft_logits)

    assert len(set(drafted)) == len(drafted), "two nodes stand for one prefix"
    assert len(drafted) == min(tree_budget, len(probabilities))
    best = sorted(probabilities.values(), reverse=True)[: len(drafted)]
    # in order of probability; float32 log-probabilities explain 1e-5
    assert [probabilities[prefix] for prefix in drafted] == pytest.approx(best, rel=1e-5, abs=1e-12)
    assert int(tree.token_ids[0]) == 7 and int(tree.parents[0]) == -1 and int(tree.depths[0]) == 0
    assert all(int(parent) < node for node, parent in enumerate(tree.parents))
    assert tree.depths[1:].tolist() == [len(prefix) for prefix in drafted]


def test_tokens_without_probability_are_not_drafted():
    draft_logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 0.0, -torch.inf]])
    assert sorted(prefixes(build_tree(draft_logits, 100))) == [(0,), (0, 0), (0, 1)]


def test_no_depth_gives_the_root_alone():
    assert len(build_tree(torch.empty(0, 10), 8)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_budget_of_the_field_at_a_real_vocabulary(dtype):
    draft_logits = torch.randn(15, 50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    tree = build_tree(draft_logits, 1024)
    assert len(tree) == 1025 and len(set(prefixes(tree))) == 1024


def test_broken_logits_are_refused():
    with pytest.raises(ValueError, match="draft_logits contain NaN"):
        build_tree(torch.full((2, 4), torch.nan), 4)


def test_of_siblings_with_one_token_the_first_is_found():
    """Draws with replacement repeat tokens, and the first draw has the largest subtree."""
    assert DraftTree.from_lists([7, 5, 5, 6], [-1, 0, 0, 1]).child(0, 5) == 1


@st.composite
def trees(draw) -> DraftTree:
    n = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    return DraftTree.from_lists(list(range(100, 100 + n)), parents)


@given(trees())
def test_ancestor_mask_is_the_transitive_closure_of_parents(tree):
    expected = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        ancestor = node
        while ancestor >= 0:
            expected[node, ancestor] = True
            ancestor = int(tree.parents[ancestor])
    assert torch.equal(tree.ancestor_mask, expected)


@given(trees())
def test_child_finds_each_node_from_its_parent_and_token(tree):
    for node in range(1, len(tree)):
        parent, token = int(tree.parents[node]), int(tree.token_ids[node])
        assert tree.child(parent, token) == node
        assert tree.child(parent, token + 1000) is None


@given(trees(), st.data())
def test_a_subtree_keeps_its_nodes_paths(tree, data):
    """Also of a tree without estimates, as a drafter of one's own may give."""
    chosen = data.draw(st.sets(st.integers(0, len(tree) - 1), min_size=1))
    nodes = torch.nonzero(tree.ancestor_mask[list(chosen)].any(0))[:, 0].tolist()
    subtree = tree.subtree(nodes)
    assert subtree.token_ids.tolist() == tree.token_ids[nodes].tolist()
    assert torch.equal(subtree.ancestor_mask, tree.ancestor_mask[nodes][:, nodes])
    assert torch.equal(subtree.depths, tree.depths[nodes])
    assert subtree.drafted_nodes(list(range(len(nodes)))) == nodes and subtree.log_reach is None
