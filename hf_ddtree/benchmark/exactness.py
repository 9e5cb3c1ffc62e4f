"""Where a greedy text leaves plain generate's, and how far from a tie that is."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from ..comparison import first_difference, ulp
from .case import generation_settings
from .methods import PLAIN


def exactness(target: PreTrainedModel, prompt: torch.Tensor, texts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Compare the greedy texts of all methods with plain generate's.

    Args:
        target: the target.
        prompt: `[1, S]` int64.
        texts: the new tokens by method, those of plain generate among them.

    Returns:
        By method "differs_at": the index of the first token that differs, or None if the texts are equal. Where they
        differ, also the "gap": how far the other token's logit lies below the maximum of plain generate at that place,
        after the logits processors. 0 is an exact tie. "gap_ulps" is the same in ulps of that maximum in the target's
        dtype. Rounding explains a gap of a few ulps. Both are infinite where one text only ends earlier.
    """
    places = {name: first_difference(tokens, texts[PLAIN]) for name, tokens in texts.items()}
    last = max((index for index in places.values() if index is not None), default=None)
    if last is None:
        return {name: {"differs_at": None} for name in texts}
    # a second call, because keeping the scores would have slowed down the plain call that was timed
    scores = target.generate(prompt, **generation_settings(0.0, last + 1), output_scores=True).scores
    result: dict[str, dict[str, Any]] = {}
    for name, index in places.items():
        result[name] = {"differs_at": index}
        if index is not None:
            ends = index >= min(len(texts[name]), len(texts[PLAIN]))
            gap = (math.inf, math.inf) if ends else gap_below(scores[index][0], texts[name][index], target.dtype)
            result[name] |= dict(zip(("gap", "gap_ulps"), gap, strict=True))
    return result


def gap_below(scores: torch.Tensor, token: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return how far a token's score lies below the maximum, and the same in ulps of the maximum.

    Args:
        scores: `[V]`.
        token: the token.
        dtype: the dtype in which the scores were computed.
    """
    best = float(scores.max())
    gap = best - float(scores[token])
    return gap, gap / ulp(best, dtype)
