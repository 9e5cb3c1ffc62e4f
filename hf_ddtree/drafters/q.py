"""q, the drafter's distribution, and how often children drawn from it are accepted."""

from functools import cached_property

import torch
from transformers import LogitsProcessorList

from ..sampling.policies import Policy
from ..sampling.randomness import Randomness

# The prior of the acceptance estimate: the value that the first drafters reached, with the weight of a few rounds.
INITIAL_ACCEPTANCE, ACCEPTANCE_PRIOR_WEIGHT = 0.3, 4


class DraftSampling:
    """How a drafter turns logits into q, and which children it may give a node, for one request.

    q is taken at the request's temperature and after its stateless warpers (top-k, top-p, min-p), so that the tree
    covers what will be sampled. Drawn children come from a generator of their own, which the global one seeds when the
    first child is drawn.

    Args:
        policy: which children a node may get.
        warpers: the request's warpers, empty for greedy decoding.
    """

    def __init__(self, policy: Policy, warpers: LogitsProcessorList | None = None):
        self.policy = policy
        self.warpers = LogitsProcessorList() if warpers is None else warpers
        self._overlaps: dict[int, tuple[float, int]] = {}  # depth -> sum and number of overlaps

    @cached_property
    def randomness(self) -> Randomness:
        """The source of drawn children. Its seed is one draw from the global generator, taken on first use."""
        return Randomness(int(torch.randint(2**62, (), dtype=torch.long, device="cpu")))

    def warp(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of q, `[n, V]`.

        Args:
            draft_logits: `[n, V]`, the drafter's raw logits.
        """
        return self.warpers(None, draft_logits.float())

    def acceptance(self, depth: int) -> float:
        """Return the estimated probability that a drawn child is accepted, from earlier rounds of the request.

        Args:
            depth: the depth of the child.
        """
        total, n = self._overlaps.get(depth, (0.0, 0))
        return (INITIAL_ACCEPTANCE * ACCEPTANCE_PRIOR_WEIGHT + total) / (ACCEPTANCE_PRIOR_WEIGHT + n)

    def update_acceptance(self, overlaps: list[tuple[int, float]]) -> None:
        """Add the proposals that a walk has tried.

        Args:
            overlaps: for each, the depth of its children, and how far q and p overlapped, from 0 to 1.
        """
        for depth, overlap in overlaps:
            total, n = self._overlaps.get(depth, (0.0, 0))
            self._overlaps[depth] = (total + overlap, n + 1)
