"""The draft tree and the relations of its nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ddtree.tree import DraftTree, Proposal, int64


@st.composite
def trees(draw) -> DraftTree:
    n = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    return DraftTree.from_lists(list(range(100, 100 + n)), parents)


def test_child_is_the_first_of_siblings_with_one_token():
    """Draws with replacement repeat tokens, and the first draw has the largest subtree."""
    assert DraftTree.from_lists([7, 5, 5, 6], [-1, 0, 0, 1]).child(0, 5) == 1


@given(trees())
def test_child_finds_each_node_from_its_parent_and_token(tree):
    for node in range(1, len(tree)):
        parent, token = int(tree.parents[node]), int(tree.token_ids[node])
        assert tree.child(parent, token) == node
        assert tree.child(parent, token + 1000) is None


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
def test_path_to_leads_from_the_root_over_all_ancestors(tree):
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert path[0] == 0 and path[-1] == node
        assert path == torch.nonzero(tree.ancestor_mask[node])[:, 0].tolist()


@given(trees())
def test_from_lists_computes_the_depths(tree):
    assert tree.depths.tolist() == [len(tree.path_to(node)) - 1 for node in range(len(tree))]
    assert tree.log_reach is None and tree.proposals == {}


@pytest.mark.parametrize("token_ids", [[7], [7, 8, 7, 9]])
def test_chain_gives_every_node_one_child(token_ids):
    tree = DraftTree.chain(token_ids)
    assert tree.token_ids.tolist() == token_ids and tree.depths.tolist() == list(range(len(token_ids)))
    assert tree.path_to(len(tree) - 1) == list(range(len(tree)))


@given(trees(), st.data())
def test_subtree_keeps_its_nodes_paths(tree, data):
    """Also of a tree without estimates, which a drafter of the user's own may return."""
    chosen = data.draw(st.sets(st.integers(0, len(tree) - 1), min_size=1))
    nodes = torch.nonzero(tree.ancestor_mask[list(chosen)].any(0))[:, 0].tolist()
    subtree = tree.subtree(nodes)
    assert subtree.token_ids.tolist() == tree.token_ids[nodes].tolist()
    assert torch.equal(subtree.ancestor_mask, tree.ancestor_mask[nodes][:, nodes])
    assert torch.equal(subtree.depths, tree.depths[nodes])
    assert subtree.log_reach is None


def test_subtree_keeps_estimates_and_the_proposals_of_kept_draws():
    """The root has a deterministic child and two draws, of which one is kept, and node 2 loses its only draw."""
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    proposals = {0: Proposal([2, 0], q, [3], 1, False), 2: Proposal([1], q, [], 2, False)}
    tree = DraftTree.from_lists([9, 3, 2, 0, 1], [-1, 0, 0, 0, 2], proposals, [0.0, -0.5, -1.0, -2.0, -3.0])
    subtree = tree.subtree([0, 1, 2])
    assert subtree.log_reach.tolist() == [0.0, -0.5, -1.0]
    assert list(subtree.proposals) == [0] and subtree.proposals[0].tokens == [2]
    assert subtree.proposals[0].q is q and subtree.proposals[0].inside == [3]
    moved = tree.subtree([0, 2, 4])
    assert moved.proposals[0].tokens == [2] and moved.proposals[1].tokens == [1]
    assert tree.proposals[0].tokens == [2, 0], "the tree itself stays as it is"


def test_outside_drops_the_deterministic_tokens_and_renormalises():
    q = torch.tensor([0.5, 0.1, 0.3, 0.1])
    outside = Proposal([], q, [0, 1], 1, False).outside(torch.zeros(4, dtype=torch.float64))
    assert outside.dtype == torch.float64
    assert outside.tolist() == pytest.approx([0, 0, 0.75, 0.25])
    assert q.tolist() == pytest.approx([0.5, 0.1, 0.3, 0.1]), "q itself stays as it is"


def test_int64_of_a_list():
    assert int64([3, -1]).tolist() == [3, -1] and int64([]).dtype == torch.int64
