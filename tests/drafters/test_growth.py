"""Growth of a tree level by level: which nodes stay, and what the drafter's forwards see."""

import math

import pytest
import torch
from helpers import prefixes

from hf_ddtree import POLICIES, Randomness
from hf_ddtree.drafters.growth import DrawnGrowth, Growth
from hf_ddtree.drafters.q import DraftSampling

Q = torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.06, 0.04], [0.2, 0.5, 0.3]])  # at the root, at token 0, at token 1


def grown(tree_budget: int) -> Growth:
    """Return two levels: the children of the root, and those of its best two children."""
    growth = Growth(7, tree_budget, DraftSampling(POLICIES["target"]))
    growth.expand([0], Q[:1].log())
    frontier = growth.frontier()[:2]
    growth.evaluate(frontier)
    growth.expand(frontier, Q[1:].log())
    return growth


def test_expand_keeps_the_best_nodes_of_all_levels():
    # by path probability: (0) .6, (0, 0) .54, (1) .3, (1, 1) .15, then (2) .1
    tree, _ = grown(4).finish()
    assert int(tree.token_ids[0]) == 7
    assert prefixes(tree) == [(0,), (0, 0), (1,), (1, 1)]
    expected = [0.0, *(math.log(value) for value in (0.6, 0.54, 0.3, 0.15))]
    torch.testing.assert_close(tree.log_reach, torch.tensor(expected))


def test_expand_drafts_no_token_without_probability():
    growth = Growth(7, 5, DraftSampling(POLICIES["target"]))
    growth.expand([0], torch.tensor([[0.0, -torch.inf, -torch.inf]]))
    tree, _ = growth.finish()
    assert prefixes(tree) == [(0,)]


def test_frontier_is_what_is_kept_of_the_newest_level():
    growth = grown(4)
    assert [growth.token_ids[node] for node in growth.frontier()] == [0, 1]
    assert growth.probability(growth.frontier()) == pytest.approx(0.54 + 0.15)


def test_evaluate_returns_the_ancestors_of_the_new_rows():
    growth = grown(4)
    visible = growth.evaluate(growth.frontier())
    # rows: the nodes (0), (1), (0, 0), (1, 1), in the order of evaluation
    assert visible.tolist() == [[True, False, True, False], [False, True, False, True]]


def test_finish_maps_tree_nodes_to_evaluated_rows():
    growth = grown(4)
    tree, rows = growth.finish()
    by_prefix = {prefixes(tree)[node - 1]: row for node, row in rows.items()}
    assert by_prefix == {(0,): 0, (1,): 1}


@pytest.mark.parametrize("policy", ["hybrid", "swor", "spectr"])
def test_expand_with_drawn_children_drops_no_node(policy):
    """Dropping drawn nodes by their tokens would bias the output."""
    sampling = DraftSampling(POLICIES[policy])
    sampling.randomness = Randomness(seed=0)
    log_probs = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    growth = DrawnGrowth(7, 8, sampling)
    growth.expand([0], log_probs[:1])
    first = list(growth.kept)
    assert len(first) == 4  # half of the budget for the first level
    growth.expand(growth.frontier()[:2], log_probs[1:])
    assert growth.kept[:4] == first and len(growth.kept) == 6
    tree, _ = growth.finish()
    assert tree.proposals and tree.log_reach is None and len(tree) == 7
