"""Comparing texts token by token and scores by their rounding."""

import math

import torch


def first_difference(tokens: list[int], expected: list[int]) -> int | None:
    """Return the index of the first token that differs, or None if both lists are equal.

    Where one list continues the other, the index is the length of the shorter one.
    """
    if tokens == expected:
        return None
    pairs = enumerate(zip(tokens, expected, strict=False))
    return next((i for i, (token, wanted) in pairs if token != wanted), min(len(tokens), len(expected)))


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place: the distance of `value` to the next larger number of `dtype`.

    Args:
        value: finite. 0 counts as 1, because scores near zero are differences of larger numbers.
        dtype: a floating point dtype.
    """
    # frexp gives 0.5 <= |mantissa| < 1, while eps is the last place of numbers from 1 to 2
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(value or 1.0)[1] - 1)
