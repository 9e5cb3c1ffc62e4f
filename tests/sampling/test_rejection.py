"""The rules that accept drawn children: exact acceptance, and what the enumeration would catch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.enumeration import exact_distribution, largest_difference, outcomes

from hf_ddtree.sampling.policies import POLICIES
from hf_ddtree.sampling.rejection import (
    choose_with_proposal,
    k_sequential,
    normalised,
    recursive_rejection,
    solve_gamma,
)
from hf_ddtree.tree import Proposal


def distributions(seed: int, vocab_size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 2).softmax(-1)
    return p, q


def test_enumeration_catches_the_rule_for_draws_on_a_deterministic_child():
    """min(1, p / q) is for a child drawn from q. On the most probable token it emits p = .2 at q = .5 with 40%."""
    p = {(): torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)}
    q = torch.tensor([0.5, 0.3, 0.2])

    def wrong(randomness):
        return (recursive_rejection(p[()], q.double(), [0], randomness),)

    distribution = outcomes(wrong)
    assert distribution[(0,)] == pytest.approx(0.4)
    assert largest_difference(distribution, exact_distribution(p, 1)) > 0.1


@pytest.mark.parametrize("seed", range(5))
def test_recursive_rejection_accepts_one_draw_as_often_as_any_coupling_allows(seed):
    """p(S) + sum over v outside S of min(p(v), q'(v))."""
    p, q = distributions(seed)
    inside = [int(q.argmax())]
    outside = Proposal([], q, inside, 1, False).outside(p)

    def accepted(randomness):
        drawn = randomness.draw_outside(q, [(inside, 1)], distinct=True)[0]
        return recursive_rejection(p, outside, drawn, randomness) in drawn + inside

    off_children = torch.ones(6, dtype=torch.bool)
    off_children[inside] = False
    expected = float(p[inside].sum() + torch.minimum(p, outside)[off_children].sum())
    assert outcomes(accepted)[True] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_sequential_accepts_gamma_beta(k):
    p, q = distributions(7)
    gamma = solve_gamma(p, q, k)
    beta = float(torch.minimum(q, p / gamma).sum())

    def accepted(randomness):
        drawn = randomness.draw_outside(q, [([], k)], distinct=False)[0]
        return k_sequential(p, q, drawn, randomness) in drawn

    # The bisection stops a little above the root, where a drawn token may also be drawn from the residual.
    assert outcomes(accepted)[True] == pytest.approx(gamma * beta, abs=2e-2)
    assert 1 - (1 - beta) ** k <= gamma * beta + 1e-12


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 8))
def test_solve_gamma_satisfies_the_inequality_and_is_nearly_the_smallest(seed, k):
    p, q = distributions(seed)

    def excess(gamma: float) -> float:
        beta = float(torch.minimum(q, p / gamma).sum())
        return 1 - (1 - beta) ** k - gamma * beta

    gamma = solve_gamma(p, q, k)
    assert 1 <= gamma <= k and excess(gamma) <= 1e-12
    step = (k - 1) / 2**10  # of the bisection
    assert gamma - step <= 1 or excess(gamma - step) > -1e-12


def test_choose_with_proposal_never_emits_banned_tokens():
    p = torch.tensor([0.0, 0.6, 0.4, 0.0])
    q = torch.tensor([0.7, 0.1, 0.1, 0.1])
    for policy, tokens in (("swor", [0, 3]), ("spectr", [0, 0]), ("hybrid", [0])):
        proposal = Proposal(tokens, q, [], 1, POLICIES[policy].replacement)
        assert set(outcomes(lambda r, x=proposal: choose_with_proposal(p, x, r)[0])) <= {1, 2}


class Always:
    """Accepts every draw."""

    def flip(self, probability):
        return True

    def draw(self, weights):
        return int(weights.argmax())


@pytest.mark.parametrize("seed", range(3))
def test_choose_with_proposal_returns_the_overlap_outside_the_deterministic_children(seed):
    p, q = distributions(seed)
    proposal = Proposal([1], q, [0, 4], 1, False)
    outside = [1, 2, 3, 5]
    expected = float(torch.minimum(p[outside], q[outside] / q[outside].sum()).sum() / p[outside].sum())
    assert choose_with_proposal(p, proposal, Always())[1] == pytest.approx(expected)


def test_choose_with_proposal_has_no_overlap_where_p_lies_on_the_deterministic_children():
    p = torch.tensor([1.0, 0.0, 0.0])
    assert choose_with_proposal(p, Proposal([1], torch.ones(3) / 3, [0], 1, False), Always())[1] == 0.0


def test_normalised_keeps_the_positive_part_and_falls_back():
    weights, otherwise = torch.tensor([-1.0, 1.0, 3.0]), torch.tensor([1.0])
    assert normalised(weights, otherwise).tolist() == [0.0, 0.25, 0.75]
    assert normalised(-weights.abs(), otherwise) is otherwise
