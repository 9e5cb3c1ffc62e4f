"""How many nodes a round gets: the number asked for, or what is worth its time on this machine."""

import time
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig

from .cost import VerifyCost, verify_cost
from .tree import DraftTree

MOST_NODES = 1024
FIRST_LIMIT = 32
FIRST_DRAFT = 0.2  # of the time of one node: what drafting is taken to cost before it was seen
MOST_SKIPPED = 64  # rounds between two attempts at drafting where it does not pay
TOLERATED_LOSS = 0.01  # of speed, before drafting pauses: looking for something to draft is nearly free
DECAY = 0.85  # of averages over rounds: about the last seven count
PATIENT_DECAY, LEAST_WEIGHT = 0.95, 4.0  # of what drafting brought: a few unlucky rounds are no reason to pause
# marginals are over-confident; believed as if they had been right so often over eight expected acceptances
PRIOR_CONFIDENCE, PRIOR_WEIGHT = 0.8, 8.0
CALIBRATION_DECAY = 0.99  # about the last hundred rounds count: texts change
BINS = 9  # halvings of the estimate, the last one for everything rarer than one in 256

_experience: WeakKeyDictionary = WeakKeyDictionary()  # drafter -> target -> temperature -> Experience


def make_budget(
    tree_budget: int | str,
    model: PreTrainedModel,
    assistant_model: object,
    generation_config: GenerationConfig,
    input_ids: torch.Tensor,
    use_kernel: bool,
) -> "Budget":
    """The budget of one request.

    Args:
        tree_budget: a number, or "auto".
        model: the target.
        assistant_model: what drafts. What rounds show of a model is remembered as long as both models live.
        generation_config: the request's settings.
        input_ids: `[1, S]`, the prompt.
        use_kernel: whether the Triton kernel attends.

    Raises:
        ValueError: for "auto" where several processes would have to agree on times.
    """
    if tree_budget != "auto":
        return Budget(tree_budget)
    if (model.tp_size or 1) > 1:
        raise ValueError('tree_budget="auto" goes by times, which differ between tensor-parallel ranks; pass a number.')
    experience = Experience()
    if isinstance(assistant_model, PreTrainedModel):
        temperature = generation_config.temperature if generation_config.do_sample else 0.0
        by_target = _experience.setdefault(assistant_model, WeakKeyDictionary())
        experience = by_target.setdefault(model, {}).setdefault(temperature, experience)
    return CostAwareBudget(verify_cost(model, input_ids.device, use_kernel), input_ids.shape[1], experience)


class Budget:
    """How many nodes the rounds of one request get: the same number in every round.

    Args:
        limit: drafted nodes, root excluded.
    """

    def __init__(self, limit: int):
        self.limit = limit

    def drafts(self, max_depth: int) -> bool:
        """Whether to draft in the round that begins; nodes are of use down to `max_depth`, which may be 0."""
        return max_depth > 0

    def trim(self, tree: DraftTree, seconds: float) -> DraftTree:
        """What of a drafted tree to verify; drafting took `seconds`."""
        return tree

    def observe(self, tree: DraftTree, path: list[int]) -> None:
        """Take in a finished round: what was verified, and the accepted path."""


class CostAwareBudget(Budget):
    """The n nodes that maximise (1 + expected accepted) / (C_draft + C_verify(n, L)), every round anew.

    Nodes are taken in order of the drafter's own estimate of reaching them, corrected by how often nodes of such an
    estimate were accepted lately. Costs are those measured on this machine, scaled by how long rounds really take.
    Where drafting does not pay, it pauses, and tries again after 1, 2, 4, .. rounds and with every request. The choice
    depends on the past and on q, never on a drawn token, so every policy stays exact.

    Args:
        cost: C_verify.
        length: L, committed tokens at the start.
        experience: what was learned before; goes on learning.

    Source: CaDDTree (arXiv 2606.01813).
    """

    def __init__(self, cost: VerifyCost, length: int, experience: "Experience"):
        super().__init__(FIRST_LIMIT)
        self.cost, self.length, self.experience = cost, length, experience
        experience.begin_request()
        self.skip = 0
        self._drafted, self._start = False, 0.0  # of the round that began last

    def drafts(self, max_depth):
        self._start = time.perf_counter()
        self._drafted = self.skip == 0 and super().drafts(max_depth)
        self.skip = max(0, self.skip - 1)
        return self._drafted

    def trim(self, tree, seconds):
        known = self.experience
        # not these seconds: drawing takes longer for some tokens than for others
        alone = known.scale.value * float(self.cost.seconds(1, self.length))
        draft_seconds = known.draft_seconds.value or FIRST_DRAFT * alone
        known.draft_seconds.add(seconds)
        if tree.log_reach is None:
            return tree
        log_reach = tree.log_reach[1:].double().numpy()
        order = np.argsort(-log_reach, kind="stable")  # parents first
        expected = 1 + np.cumsum([0.0, *known.calibration.expected(log_reach[order])])
        costs = known.scale.value * self.cost.seconds(np.arange(1, len(tree) + 1), self.length)
        n = int(np.argmax(expected / (draft_seconds + costs)))
        self.limit = min(max(2 * n, FIRST_LIMIT), MOST_NODES)
        return tree.subtree([0, *sorted((order[:n] + 1).tolist())])

    def observe(self, tree, path):
        known = self.experience
        seconds = time.perf_counter() - self._start
        drafting = known.draft_seconds.value if self._drafted else 0.0
        alone, verify = self.cost.seconds(np.array([1, len(tree)]), self.length)
        known.scale.add(max(seconds - drafting, 0.0) / verify)
        self.length += len(path)
        if not self._drafted:
            return
        if tree.log_reach is not None:
            accepted = np.zeros(len(tree), dtype=bool)
            accepted[path] = True
            known.calibration.observe(tree.log_reach[1:].double().numpy(), accepted[1:])
        # in modelled times, of which noise has been averaged out
        alone, seconds = known.scale.value * alone, drafting + known.scale.value * verify
        known.tokens.add(len(path))
        known.seconds.add(seconds)
        if len(path) * alone > seconds:
            known.pause = 1  # it may pay again
        judged = known.tokens.weight > LEAST_WEIGHT or len(tree) == 1  # a draft not worth verifying is no bad luck
        if judged and known.tokens.value * alone < (1 - TOLERATED_LOSS) * known.seconds.value:
            self.skip, known.pause = known.pause, min(2 * known.pause, MOST_SKIPPED)


class Experience:
    """What rounds with one drafter have shown: its calibration, what it takes and brings, and the pause it deserves.

    Attributes:
        calibration: of its estimates.
        draft_seconds: of drafting one tree.
        scale: of the rest of a round to C_verify.
        tokens: of rounds that drafted.
        seconds: of rounds that drafted.
        pause: rounds to skip the next time drafting does not pay.
    """

    def __init__(self):
        self.calibration = Calibration()
        self.draft_seconds, self.scale = Average(), Average(1.0)
        self.tokens, self.seconds = Average(decay=PATIENT_DECAY), Average(decay=PATIENT_DECAY)
        self.pause = 1

    def begin_request(self) -> None:
        """Let the past count just enough to judge the first draft of another text by."""
        for average in (self.tokens, self.seconds):
            average.weight = min(average.weight, LEAST_WEIGHT)


class Calibration:
    """Expected acceptance of a node from the drafter's estimate r: r (accepted) / (expected), by size of r, lately.

    Sizes that were seen little are taken to be like all others together.
    """

    def __init__(self):
        self.accepted, self.estimated = np.zeros(BINS), np.zeros(BINS)

    def expected(self, log_reach: np.ndarray) -> np.ndarray:
        """`[n]`: how probable the acceptance of each node is."""
        overall = _ratio(self.accepted.sum(), self.estimated.sum(), PRIOR_CONFIDENCE)
        return np.exp(log_reach) * _ratio(self.accepted, self.estimated, overall)[_bins(log_reach)]

    def observe(self, log_reach: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from the verified nodes of one round: `accepted` `[n]` bool."""
        bins = _bins(log_reach)
        self.accepted = CALIBRATION_DECAY * self.accepted + np.bincount(bins, accepted, minlength=BINS)
        self.estimated = CALIBRATION_DECAY * self.estimated + np.bincount(bins, np.exp(log_reach), minlength=BINS)


def _ratio(accepted, estimated, prior):
    return (PRIOR_WEIGHT * prior + accepted) / (PRIOR_WEIGHT + estimated)


def _bins(log_reach: np.ndarray) -> np.ndarray:
    return np.clip(-log_reach / np.log(2), 0, BINS - 1).astype(int)


class Average:
    """A mean over rounds in which the older ones fade, `value`; the first value until there are others."""

    def __init__(self, value: float = 0.0, decay: float = DECAY):
        self.value, self.decay = value, decay
        self.weight = 0.0

    def add(self, value: float) -> None:
        self.weight = self.decay * self.weight + 1
        self.value += (value - self.value) / self.weight
