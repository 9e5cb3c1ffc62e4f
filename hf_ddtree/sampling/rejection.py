"""Rejection sampling: choosing a token of exactly the target's distribution p that is often a drawn child.

The walk calls `choose_with_proposal` at a node with drawn children. The two rules are recursive rejection, for children
drawn without replacement, and k-sequential selection, for independent draws.
"""

import torch
from torch.nn.functional import pad

from ..tree import Proposal
from .randomness import Randomness

GAMMA_STEPS = 10  # bisection steps. Each halves the acceptance that is still to be gained.


def choose_with_proposal(p: torch.Tensor, proposal: Proposal, randomness: Randomness) -> tuple[int, float]:
    """Choose a token distributed as p that is a child of the node as often as the proposal allows.

    Args:
        p: `[V]`, the target's distribution after all processors.
        proposal: the drawn children.
        randomness: the source of flips and draws.

    Returns:
        The token, and the overlap sum_v min(p(v), q(v)) / (1 - p(S)), where q is restricted to the tokens outside the
        deterministic children S. The overlap is the probability that one draw is accepted once the walk leaves S. It
        has the same mean as the outcomes of the flips and less variance.
    """
    width = max(len(p), len(proposal.q))  # a processor may drop columns, such as the padding of the vocabulary
    p = pad(p, (0, width - len(p)))
    q = pad(proposal.outside(p), (0, width - len(proposal.q)))
    outside = 1 - float(p[proposal.inside].sum())
    overlap = float(torch.minimum(p, q).sum()) / outside if outside > 0 else 0.0
    rule = k_sequential if proposal.replacement else recursive_rejection
    return rule(p, q, proposal.tokens, randomness), overlap


def recursive_rejection(p: torch.Tensor, q: torch.Tensor, tokens: list[int], randomness: Randomness) -> int:
    """Accept x_i with min(1, r(x_i) / q_i(x_i)), otherwise set r <- norm(max(0, r - q_i)). At the end draw y ~ r.

    r starts as p. x_i was drawn from q_i, which is q without the deterministic children S and without x_1 .. x_{i-1}.
    Each step is speculative sampling of r by q_i with the residual taken over the whole vocabulary, so the result has
    distribution p for every S and any number of draws. With one draw P(accept) = sum_v min(p(v), q_1(v)), and the walk
    also continues with probability p(S).

    Args:
        p: `[V]`, the target's distribution.
        q: `[V]`, the distribution of the first draw.
        tokens: the drawn tokens, in draw order.
        randomness: the source of flips and draws.

    Source: Leviathan et al. (arXiv 2211.17192), Appendix A.1, applied recursively as in Sequoia (arXiv 2402.12374).
    """
    residual = p
    for i, token in enumerate(tokens):
        if i:
            q = q.clone()
            q[tokens[i - 1]] = 0
            q = normalised(q, otherwise=q)
        if randomness.flip(float(residual[token] / q[token])):
            return token
        residual = normalised(residual - q, otherwise=residual)
    return randomness.draw(residual)


def k_sequential(p: torch.Tensor, q: torch.Tensor, tokens: list[int], randomness: Randomness) -> int:
    """Accept the first x_i with probability min(1, p(x_i) / (g q(x_i))). At the end draw y ~ norm(p - c min(q, p / g)).

    x_1 .. x_k are independent draws from q. b = sum_v min(q(v), p(v) / g) is the probability that one is accepted, and
    c = (1 - (1 - b)^k) / b. g solves 1 - (1 - b)^k = g b. It is the smallest g for which the residual is not negative.

    Args:
        p: `[V]`, the target's distribution.
        q: `[V]`, the distribution of each draw.
        tokens: the drawn tokens, in draw order.
        randomness: the source of flips and draws.

    Source: Sun et al., SpecTr (arXiv 2310.15141), Algorithm 3 and Theorem 1.
    """
    k = len(tokens)
    gamma = solve_gamma(p, q, k)
    accepted = torch.minimum(q, p / gamma)
    for token in tokens:
        if randomness.flip(float(accepted[token] / q[token])):
            return token
    beta = float(accepted.sum())
    factor = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
    return randomness.draw(normalised(p - factor * accepted, otherwise=p))


def solve_gamma(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """Return, from above, the smallest g in [1, k] with 1 - (1 - b)^k <= g b, where b = sum_v min(q(v), p(v) / g).

    Any g that satisfies the inequality keeps the output exact. A larger g only accepts fewer draws.

    Args:
        p: `[V]`, the target's distribution.
        q: `[V]`, the distribution of each draw.
        k: the number of draws.
    """
    low, high = 1.0, float(k)
    for _ in range(GAMMA_STEPS if k > 1 else 0):
        middle = (low + high) / 2
        beta = float(torch.minimum(q, p / middle).sum())
        if 1 - (1 - beta) ** k <= middle * beta:
            high = middle
        else:
            low = middle
    return high


def normalised(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Return the positive part of `weights`, scaled to sum 1.

    Args:
        weights: `[V]`.
        otherwise: the result if no weight is positive, which only rounding causes.
    """
    positive = weights.clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else otherwise
