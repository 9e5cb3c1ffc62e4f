"""C_verify: what verifying n nodes costs, as a convex function of n from measured times."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class VerifyCost:
    """C_verify(n, L): convex and never falling in n, linear in L from the shorter of two measured lengths on.

    Args:
        sizes: numbers of nodes, the root included, ascending.
        lengths: the two lengths, in committed tokens.
        measured: `[2][len(sizes)]`, seconds.

    Raises:
        ValueError: if the arguments do not fit together.
    """

    sizes: list[int]
    lengths: list[int]
    measured: list[list[float]]

    def __post_init__(self):
        values = np.array(self.measured, dtype=float)
        if values.shape != (2, len(self.sizes)) or len(self.sizes) < 2 or len(self.lengths) != 2:
            raise ValueError("a cost has two lengths, two sizes at least, and a value for each of both")
        if not (np.isfinite(values).all() and (values > 0).all() and (np.diff(self.sizes) > 0).all()):
            raise ValueError("costs are positive numbers, for ascending sizes")

    def seconds(self, n_nodes: int | np.ndarray, length: int) -> np.ndarray:
        """Return the seconds of a forward.

        Args:
            n_nodes: the number of nodes, the root included, or an array of such numbers.
            length: the number of committed tokens.
        """
        short, long = (_evaluate(self.sizes, row, n_nodes) for row in self._convex)
        share = (length - self.lengths[0]) / max(1, self.lengths[1] - self.lengths[0])
        # a longer text never costs less, and a measurement that says otherwise is noise
        return short + max(share, 0.0) * np.maximum(long - short, 0.0)

    @cached_property
    def _convex(self) -> list[list[float]]:
        return [convex_below(self.sizes, row) for row in self.measured]


def convex_below(sizes: list[int], seconds: list[float]) -> list[float]:
    """Return the largest convex, non-decreasing function below some points, at these points: their lower convex hull.

    Args:
        sizes: ascending.
        seconds: one value per size. Their running minimum from the right makes the result non-decreasing.
    """
    lowest = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1 and _slope(sizes, lowest, hull[-2], hull[-1]) >= _slope(sizes, lowest, hull[-1], i):
            hull.pop()
        hull.append(i)
    return np.interp(sizes, [sizes[i] for i in hull], [lowest[i] for i in hull]).tolist()


def _slope(sizes, seconds, i: int, j: int) -> float:
    return (seconds[j] - seconds[i]) / (sizes[j] - sizes[i])


def _evaluate(sizes: list[int], seconds: list[float], n_nodes: int | np.ndarray) -> np.ndarray:
    """Interpolate linearly between the points. Beyond the last one, the slope of the last two continues."""
    n_nodes = np.asarray(n_nodes)
    beyond = np.maximum(n_nodes - sizes[-1], 0) * _slope(sizes, seconds, -2, -1)
    return np.interp(n_nodes, sizes, seconds) + beyond
