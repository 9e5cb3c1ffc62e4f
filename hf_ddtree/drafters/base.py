"""What a drafter is to the decoding loop."""

import time
from functools import cached_property

import numpy as np
import torch
from transformers.generation import (
    CandidateGenerator,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..budget import Budget
from ..randomness import Randomness
from ..tree import POLICIES, DraftTree, Policy

# before anything was observed: what the first drafters settled at, with the weight of a few rounds
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.3, 4


class TreeCandidateGenerator(CandidateGenerator):
    """Proposes a tree per round. One object serves one `generate` call and holds that call's drafting state.

    A drafter only shapes the tree: what it drafts cannot change the output, as long as the tree starts with the last
    token, drawn children were drawn from the q they come with, and the global random generators are left alone.

    Attributes:
        tapped_states: the target's hidden states it reads, as indices into `outputs.hidden_states`.
        sampling: how it chooses children, None if it never draws any.
        used: it has served its call.
    """

    tapped_states: tuple[int, ...] = ()
    sampling: "DraftSampling | None" = None
    used: bool = False

    def prefill(self, hidden_states: torch.Tensor | None, position_ids: torch.Tensor) -> None:
        """Take in what the target's prefill computed.

        Args:
            hidden_states: `[1, P, taps * H]`, the tapped states of the prompt tokens that ran, padding excluded.
            position_ids: `[1, P]` int64, their positions.
        """

    def get_candidates(self, input_ids: torch.Tensor, tree_budget: int, max_depth: int) -> DraftTree:
        """Draft the tree of the next round.

        Args:
            input_ids: `[1, S]` int64, the sequence without padding; its last token is the root.
            tree_budget: drafted nodes, root excluded.
            max_depth: deepest useful node, at least 1: beyond it the generation has ended.

        Returns:
            A tree whose root carries the last token. With a fixed budget all of its nodes are verified, also those beyond it.
        """
        raise NotImplementedError

    def commit_path(self, path: list[int], hidden_states: torch.Tensor | None) -> None:
        """Take in the accepted path of a round.

        Args:
            path: node indices from the root down, of the tree drafted last. The root alone, 0, where the round had no draft:
                `get_candidates` is not called in every round.
            hidden_states: `[1, len(path), taps * H]`, the target's tapped states at these nodes.
        """

    def observe(self, overlaps: list[tuple[int, float]]) -> None:
        """Take in how the drawn children that were tried fared.

        Args:
            overlaps: for each, its depth and the overlap of q and p there, from 0 to 1.
        """
        if self.sampling is not None:
            self.sampling.observe(overlaps)


def draft_tree(drafter: TreeCandidateGenerator, input_ids: torch.Tensor, budget: Budget, max_depth: int) -> DraftTree:
    """The drafter's tree, as far as the budget wants it verified; the root alone where only one more token may follow.

    Raises:
        ValueError: if a generator of the user's own returns something else, which could change the output.
    """
    root_token_id = int(input_ids[0, -1])
    if not budget.drafts(max_depth):
        return DraftTree.from_lists([root_token_id], [-1])
    start = time.perf_counter()
    tree = drafter.get_candidates(input_ids, budget.limit, max_depth)
    if not isinstance(tree, DraftTree) or int(tree.token_ids[0]) != root_token_id:
        raise ValueError(
            f"assistant_model: get_candidates must return a DraftTree whose root is the last token, {root_token_id}."
        )
    if problem := _problem(tree):
        raise ValueError(f"assistant_model: what get_candidates returned is no tree: {problem}.")
    return budget.trim(tree, time.perf_counter() - start)


def _problem(tree: DraftTree) -> str | None:
    """Why mask, positions or the choice of nodes would go wrong with this tree."""
    parents, depths = tree.parents.numpy(), tree.depths.numpy()
    reach = np.zeros(len(tree)) if tree.log_reach is None else tree.log_reach.numpy()
    above = parents[1:]
    if not len(parents) == len(depths) == len(reach) == len(tree):
        return "its arrays are of different lengths"
    if parents[0] != -1 or (above < 0).any() or (above >= np.arange(1, len(tree))).any():
        return "the root's parent is -1, and every other parent precedes its children"
    if depths[0] != 0 or (depths[1:] != depths[above] + 1).any():
        return "depths are the numbers of edges to the root"
    if reach[0] != 0 or not (reach[1:] <= reach[above]).all():
        return "log_reach is 0 at the root, and at most the parent's elsewhere"
    return None


class DraftSampling:
    """How a drafter turns logits into q, and which children it may give a node, for one request.

    q is taken at the request's temperature and after its stateless warpers (top-k, top-p, min-p), so that the tree covers
    what will be sampled. Drawn children come from a generator of their own, seeded by the global one if there are any.

    Args:
        generation_config: the request's settings.
        policy: the request's; greedy decoding has no use for drawn children.
    """

    def __init__(self, generation_config: GenerationConfig, policy: Policy):
        self.policy = policy if generation_config.do_sample else POLICIES["target"]
        self.warpers = stateless_warpers(generation_config) if generation_config.do_sample else LogitsProcessorList()
        self._observed: dict[int, tuple[float, int]] = {}  # depth -> sum and number of overlaps

    @cached_property
    def randomness(self) -> Randomness:
        """A generator of its own. Its seed is one draw from the global one, taken when the first child is drawn."""
        return Randomness(int(torch.randint(2**62, ())))

    def warp(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """The logits of q, `[n, V]`, from raw ones."""
        return self.warpers(None, draft_logits.float())

    def acceptance(self, depth: int) -> float:
        """How probable the acceptance of a drawn child at this depth is, from past rounds of this request."""
        total, n = self._observed.get(depth, (0.0, 0))
        return (PRIOR_ACCEPTANCE * PRIOR_WEIGHT + total) / (PRIOR_WEIGHT + n)

    def observe(self, overlaps: list[tuple[int, float]]) -> None:
        """Learn from the proposals a walk has tried: their depth, and how far q and p overlapped."""
        for depth, overlap in overlaps:
            total, n = self._observed.get(depth, (0.0, 0))
            self._observed[depth] = (total + overlap, n + 1)


def stateless_warpers(generation_config: GenerationConfig) -> LogitsProcessorList:
    """Temperature, top-k, top-p and min-p as transformers applies them, in its order."""
    settings, warpers = generation_config, LogitsProcessorList()
    if settings.temperature not in (None, 0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p is not None:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers
