"""Where random choices come from."""

import torch

POOL_FACTOR = 4  # draws per wanted index, which serve two thirds of the weight being excluded


class Randomness:
    """Random choices from one generator.

    Args:
        seed: of a generator of its own; None uses torch's global ones, as plain `generate` does.
    """

    def __init__(self, seed: int | None = None):
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def flip(self, probability: float) -> bool:
        """True with the given probability; for certain if it is 1 or more."""
        return float(torch.rand((), generator=self._generator(torch.device("cpu")))) < probability

    def draw(self, weights: torch.Tensor) -> int:
        """An index with probability proportional to `weights` `[V]`."""
        # a single one would be drawn by other means, which take ten times as long; the second one is for the case, some
        # 1 in 10^16, that rounding gives an index without weight
        return next(index for index in self._many(weights, 2) if weights[index] > 0)

    def draw_outside(
        self, weights: torch.Tensor, requests: list[tuple[list[int], int]], distinct: bool
    ) -> list[list[int]]:
        """Indices drawn outside given sets.

        All requests are served from one pool of independent draws, each skipping what it may not take: rejection leaves
        the rest of the distribution as it is, and a sample without replacement is that of the first occurrences.

        Args:
            weights: `[V]`.
            requests: pairs (excluded indices, n); each asks for n indices proportional to the weights of the others.
            distinct: draw each request without replacement. n must not exceed the indices that have weight.
        """
        n_draws = POOL_FACTOR * sum(n for _, n in requests) + POOL_FACTOR
        pool = iter(self._many(weights, n_draws))
        results = []
        for excluded, n in requests:
            taken: list[int] = []
            for index in pool:
                if index not in excluded and not (distinct and index in taken):
                    taken.append(index)
                    if len(taken) == n:
                        break
            while len(taken) < n:  # the pool is used up: almost all of the weight is excluded
                rest = weights.clone()
                rest[excluded + taken if distinct else excluded] = 0
                taken.append(self.draw(rest))
            results.append(taken)
        return results

    def _many(self, weights: torch.Tensor, n: int) -> list[int]:
        # with replacement it inverts a cumulative sum, in which fp32 would lose the tail of a large vocabulary
        device = torch.device("cpu") if weights.device.type == "mps" else weights.device  # which has no fp64
        weights = weights.to(device, torch.float64)
        return torch.multinomial(weights, n, replacement=True, generator=self._generator(device)).tolist()

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
