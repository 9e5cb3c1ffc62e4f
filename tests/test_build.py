"""build_tree against full enumeration, and its two searches against each other."""

import itertools
import math

import pytest
import torch
from helpers import prefixes
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree import POLICIES, Randomness, build_tree
from hf_ddtree.build import OpenNodes, Shape, draw_children, most_probable_prefixes, shape_with_draws
from hf_ddtree.sampling.policies import Policy

DETERMINISTIC = Policy(deterministic=True, drawn=0)


def enumerate_prefixes(draft_logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Return every prefix and its probability under the product of the marginals."""
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
def test_build_tree_takes_the_most_probable_prefixes(depth, vocab_size, tree_budget, scale, seed):
    draft_logits = scale * torch.randn(depth, vocab_size, generator=torch.Generator().manual_seed(seed))
    tree = build_tree(draft_logits, tree_budget, root_token_id=7)
    drafted = prefixes(tree)
    probabilities = enumerate_prefixes(draft_logits)

    assert len(set(drafted)) == len(drafted), "two nodes stand for one prefix"
    assert len(drafted) == min(tree_budget, len(probabilities))
    best = sorted(probabilities.values(), reverse=True)[: len(drafted)]
    # in order of probability, where float32 log-probabilities explain 1e-5
    assert [probabilities[prefix] for prefix in drafted] == pytest.approx(best, rel=1e-5, abs=1e-12)
    assert int(tree.token_ids[0]) == 7 and int(tree.parents[0]) == -1 and int(tree.depths[0]) == 0
    assert all(int(parent) < node for node, parent in enumerate(tree.parents))
    assert tree.depths[1:].tolist() == [len(prefix) for prefix in drafted]


def test_build_tree_drafts_no_token_without_probability():
    draft_logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 0.0, -torch.inf]])
    assert sorted(prefixes(build_tree(draft_logits, 100))) == [(0,), (0, 0), (0, 1)]


def test_build_tree_without_depth_gives_the_root_alone():
    assert len(build_tree(torch.empty(0, 10), 8)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_build_tree_takes_a_large_budget_at_a_real_vocabulary(dtype):
    draft_logits = torch.randn(15, 50_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    tree = build_tree(draft_logits, 1024)
    assert len(tree) == 1025 and len(set(prefixes(tree))) == 1024


@pytest.mark.parametrize("broken", [[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]], ids=str)
@pytest.mark.parametrize("policy", ["target", "hybrid"])
def test_build_tree_refuses_a_row_that_is_no_distribution(broken, policy):
    rows = torch.tensor([[0.0, 1.0, -torch.inf, 0.0], [0.0, 0.0, *broken]])
    rows[1, :2] = broken[1]
    arguments = {"policy": POLICIES[policy], "acceptance": [0.5, 0.5], "randomness": Randomness(0)}
    with pytest.raises(ValueError, match="draft_logits: a row contains NaN or infinity, or nothing but minus infinity"):
        build_tree(rows, 4, **arguments)


@pytest.mark.parametrize("missing", ["acceptance", "randomness"])
def test_build_tree_refuses_a_policy_that_draws_without_what_it_needs(missing):
    arguments = {"acceptance": [0.5], "randomness": Randomness(0), missing: None}
    with pytest.raises(ValueError, match=missing):
        build_tree(torch.zeros(1, 4), 2, policy=POLICIES["hybrid"], **arguments)


def test_build_tree_fixes_the_shape_before_it_draws():
    logits = 2 * torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    for name in ("hybrid", "swor", "spectr"):
        trees = [build_tree(logits, 20, 0, POLICIES[name], [0.5] * 4, Randomness(seed)) for seed in range(5)]
        assert len({tuple(tree.parents.tolist()) for tree in trees}) == 1
        assert len({tuple(tree.log_reach.tolist()) for tree in trees}) == 1
        assert len({tuple(tree.token_ids.tolist()) for tree in trees}) > 1


def test_build_tree_carries_what_its_drawn_children_were_drawn_from():
    logits = 2 * torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    tree = build_tree(logits, 20, 0, POLICIES["hybrid"], [0.9] * 4, Randomness(0))
    assert tree.proposals
    for node, proposal in tree.proposals.items():
        children = [child for child in range(len(tree)) if int(tree.parents[child]) == node]
        assert sorted(tree.token_ids[children].tolist()) == sorted(proposal.inside + proposal.tokens)
        assert proposal.depth == int(tree.depths[node]) + 1 and not set(proposal.tokens) & set(proposal.inside)
        # the sharpened q of the level
        torch.testing.assert_close(proposal.q, (logits[proposal.depth - 1] / 0.8).softmax(-1))


@st.composite
def sorted_log_probs(draw) -> list[list[float]]:
    """Draw sorted log-probabilities of a few levels, of different widths and with ties."""
    values = st.one_of(st.floats(-20, 0), st.sampled_from([-3.0, -1.0, -0.5]))
    level = st.lists(values, min_size=1, max_size=5).map(lambda row: sorted(row, reverse=True))
    return draw(st.lists(level, min_size=1, max_size=4))


@settings(max_examples=300, deadline=None)
@given(log_probs=sorted_log_probs(), tree_budget=st.integers(1, 60), acceptance=st.floats(0, 1))
def test_shape_with_draws_of_a_policy_that_draws_nothing_equals_most_probable_prefixes(
    log_probs, tree_budget, acceptance
):
    """The two searches take the same nodes in the same order, also where probabilities are tied."""
    drawing = shape_with_draws(log_probs, tree_budget, DETERMINISTIC, [acceptance] * len(log_probs))
    assert drawing == most_probable_prefixes(log_probs, tree_budget)


def paths_of(shape: Shape) -> list[tuple[int, ...]]:
    """Return the ranks from the root's child down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for rank, parent in zip(shape[1], shape[2], strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


SEARCHES = {
    "most_probable_prefixes": most_probable_prefixes,
    "shape_with_draws": lambda log_probs, n: shape_with_draws(log_probs, n, DETERMINISTIC, [0.5] * len(log_probs)),
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@settings(max_examples=100, deadline=None)
@given(log_probs=sorted_log_probs(), tree_budget=st.integers(1, 60))
def test_shapes_without_draws_equal_enumeration(search, log_probs, tree_budget):
    values = {
        ranks: sum(log_probs[level][rank] for level, rank in enumerate(ranks))
        for n in range(1, len(log_probs) + 1)
        for ranks in itertools.product(*(range(len(row)) for row in log_probs[:n]))
    }
    shape = search(log_probs, tree_budget)
    paths = paths_of(shape)
    assert len(set(paths)) == len(paths) == min(tree_budget, len(values))
    assert shape[0] == [len(path) - 1 for path in paths]
    assert shape[3] == pytest.approx([values[path] for path in paths])
    assert shape[3] == pytest.approx(sorted(values.values(), reverse=True)[: len(paths)])


@settings(max_examples=100, deadline=None)
@given(
    log_probs=st.lists(st.floats(-6, -0.1), min_size=1, max_size=6),
    acceptance=st.floats(0.05, 0.95),
    name=st.sampled_from(["hybrid", "swor"]),
)
def test_open_nodes_offers_children_of_one_node_by_their_estimates(log_probs, acceptance, name):
    """The estimates follow the formula, fall, and a policy never gets more draws than it allows."""
    row = sorted(log_probs, reverse=True)
    total = math.log(sum(map(math.exp, row)) * 1.1)  # some probability lies outside the listed tokens
    row = [value - total for value in row]
    policy, open_nodes = POLICIES[name], OpenNodes(POLICIES[name])
    open_nodes.add(0, -1.0, row, acceptance)
    taken = []
    while child := open_nodes.take():
        taken.append(child)
    n_deterministic, n_drawn, mass = 0, 0, 0.0
    for _, rank, log_reach in taken:
        if rank >= 0:
            assert rank == n_deterministic and log_reach == pytest.approx(-1 + row[rank])
            n_deterministic, mass = n_deterministic + 1, mass + math.exp(row[rank])
        else:
            value = (1 - mass) * acceptance * (1 - acceptance) ** n_drawn
            assert log_reach == pytest.approx(-1 + math.log(value))
            n_drawn += 1
    estimates = [log_reach for _, _, log_reach in taken]
    assert estimates == sorted(estimates, reverse=True)
    assert n_drawn <= policy.drawn


@pytest.mark.parametrize("name", ["hybrid", "swor", "spectr"])
def test_draw_children_returns_one_proposal_a_parent(name):
    policy, q = POLICIES[name], torch.ones(10) / 10
    proposals = draw_children(q, [([1, 2], 1), ([], 3)], 4, policy, Randomness(0))
    assert [len(proposal.tokens) for proposal in proposals] == [1, 3]
    assert [proposal.inside for proposal in proposals] == [[1, 2], []]
    assert all(proposal.q is q and proposal.depth == 4 for proposal in proposals)
    assert all(proposal.replacement == policy.replacement for proposal in proposals)
    assert not set(proposals[0].tokens) & {1, 2}
