"""What earlier rounds have shown: how often drafted nodes are accepted, what drafting costs, and what it gains."""

from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedModel

TIME_DECAY = 0.85  # of averages of times: about the last seven rounds count
GAIN_DECAY = 0.95  # of averages of what drafting gains, so that a few unlucky rounds are no reason to pause
MAX_CARRIED_WEIGHT = 4.0  # of the gains of earlier requests, when a new request begins
ACCEPTANCE_DECAY = 0.99  # of acceptance by estimate: about the last hundred rounds count, because texts change
# Marginals are over-confident. The prior says that they were right this often, with the weight of eight expected
# acceptances.
INITIAL_CONFIDENCE, CONFIDENCE_PRIOR_WEIGHT = 0.8, 8.0
N_BINS = 9  # halvings of the estimate. The last bin holds everything rarer than one in 256.
# Temperatures within a step share a history, because a server may pass on any temperature that a client chooses. The
# averages follow a small change of the acceptance within a hundred rounds.
TEMPERATURE_STEP, MAX_TEMPERATURE = 0.1, 2.0

_histories: WeakKeyDictionary = WeakKeyDictionary()  # drafter -> target -> temperature in steps -> History


class MovingAverage:
    """Exponential moving average over rounds. `value` holds the initial value until the first update.

    Args:
        value: the initial value.
        decay: the factor by which the weight of earlier rounds falls with each round.
    """

    def __init__(self, value: float = 0.0, decay: float = TIME_DECAY):
        self.value, self.decay = value, decay
        self.weight = 0.0

    def update(self, value: float) -> None:
        """Add the value of one round."""
        self.weight = self.decay * self.weight + 1
        self.value += (value - self.value) / self.weight


class AcceptanceByEstimate:
    """How often nodes were accepted in earlier rounds, by the size of the drafter's estimate of reaching them.

    The expected acceptance of a node with estimate r is r (accepted nodes) / (sum of estimates) over the nodes of its
    bin. Bins with few observations use the overall correction.
    """

    def __init__(self):
        self.accepted, self.estimated = np.zeros(N_BINS), np.zeros(N_BINS)

    def expected(self, log_reach: np.ndarray) -> np.ndarray:
        """Return the probability that each node is accepted, `[n]`.

        Args:
            log_reach: `[n]`, the logarithms of the estimates.
        """
        overall = _corrected(self.accepted.sum(), self.estimated.sum(), INITIAL_CONFIDENCE)
        by_bin = _corrected(self.accepted, self.estimated, overall)
        return np.exp(log_reach) * by_bin[_bins(log_reach)]

    def update(self, log_reach: np.ndarray, accepted: np.ndarray) -> None:
        """Add the verified nodes of one round.

        Args:
            log_reach: `[n]`, the logarithms of the estimates.
            accepted: `[n]` bool.
        """
        bins = _bins(log_reach)
        self.accepted = ACCEPTANCE_DECAY * self.accepted + np.bincount(bins, accepted, minlength=N_BINS)
        self.estimated = ACCEPTANCE_DECAY * self.estimated + np.bincount(bins, np.exp(log_reach), minlength=N_BINS)


def _corrected(accepted, estimated, prior):
    return (CONFIDENCE_PRIOR_WEIGHT * prior + accepted) / (CONFIDENCE_PRIOR_WEIGHT + estimated)


def _bins(log_reach: np.ndarray) -> np.ndarray:
    return np.clip(-log_reach / np.log(2), 0, N_BINS - 1).astype(int)


class History:
    """What rounds with one drafter, one target and similar temperatures have shown.

    Attributes:
        acceptance: the acceptance of nodes by the drafter's estimate.
        draft_seconds: seconds of drafting one tree.
        scale: seconds of the rest of a round, relative to C_verify.
        tokens: tokens per round, over the rounds that drafted.
        seconds: seconds per round, over the rounds that drafted.
        pause: how many rounds to skip the next time that drafting does not pay.
    """

    def __init__(self):
        self.acceptance = AcceptanceByEstimate()
        self.draft_seconds, self.scale = MovingAverage(), MovingAverage(1.0)
        self.tokens, self.seconds = MovingAverage(decay=GAIN_DECAY), MovingAverage(decay=GAIN_DECAY)
        self.pause = 1

    def begin_request(self) -> None:
        """Limit the weight of earlier requests, so that a new text can change the estimate quickly."""
        for average in (self.tokens, self.seconds):
            average.weight = min(average.weight, MAX_CARRIED_WEIGHT)


def history_of(assistant_model: object, model: PreTrainedModel, temperature: float) -> History:
    """Return the history of a drafter and a target at a temperature. It lives in memory as long as both models do.

    Temperatures are rounded to steps of 0.1, and those above 2 share the history of 2. Two models therefore have at
    most 21 histories, also in a server where every client chooses a temperature. Greedy decoding has its own.

    Args:
        assistant_model: what the user passed. Anything but a model serves one request and gets an empty history.
        model: the target.
        temperature: 0 for greedy decoding.
    """
    if not isinstance(assistant_model, PreTrainedModel):
        return History()
    by_target = _histories.setdefault(assistant_model, WeakKeyDictionary())
    return by_target.setdefault(model, {}).setdefault(_steps(temperature), History())


def _steps(temperature: float) -> int:
    """Return a temperature as a number of steps: 0 for greedy decoding, and at least 1 for sampling."""
    return max(1, round(min(temperature, MAX_TEMPERATURE) / TEMPERATURE_STEP)) if temperature > 0 else 0
