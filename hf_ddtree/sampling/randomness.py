"""The source of random choices."""

import torch

POOL_FACTOR = 4  # draws per wanted index. They are enough unless more than about two thirds of the weight are excluded.


class Randomness:
    """Random choices from one generator.

    Args:
        seed: seeds a generator of its own. None uses torch's global generators, as plain `generate` does.

    Example:
        >>> hf_ddtree.Randomness(seed=0).draw(torch.tensor([0.0, 1.0]))
        1
    """

    def __init__(self, seed: int | None = None):
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def flip(self, probability: float) -> bool:
        """Return True with the given probability, and always if it is 1 or more.

        Args:
            probability: not negative.
        """
        # fp32 has steps of 6e-8, so a flip below that probability would come true too often
        generator = self._generator(torch.device("cpu"))
        return float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu")) < probability

    def draw(self, weights: torch.Tensor) -> int:
        """Return an index with probability proportional to its weight.

        Args:
            weights: `[V]`, not negative.
        """
        # Two draws, because torch draws a single one by another method that takes ten times as long. The second one
        # serves if rounding makes the first one an index without weight, which happens in about 1 of 10^16 cases.
        return next(index for index in self._draw_many(weights, 2) if weights[index] > 0)

    def draw_outside(
        self, weights: torch.Tensor, requests: list[tuple[list[int], int]], distinct: bool
    ) -> list[list[int]]:
        """Return indices drawn outside given sets, one list per request.

        All requests are served from one pool of independent draws, and each skips the indices that it must not take.
        Skipping leaves the rest of the distribution as it is, and the first occurrences are a sample without
        replacement.

        Args:
            weights: `[V]`, not negative.
            requests: pairs (excluded indices, n). Each asks for n indices, proportional to the weights of the others.
            distinct: whether each request is drawn without replacement. n must not exceed the number of indices that
                have weight.
        """
        n_draws = POOL_FACTOR * sum(n for _, n in requests) + POOL_FACTOR
        pool = iter(self._draw_many(weights, n_draws))
        results = []
        for excluded, n in requests:
            taken: list[int] = []
            for index in pool:
                if index not in excluded and not (distinct and index in taken):
                    taken.append(index)
                    if len(taken) == n:
                        break
            while len(taken) < n:  # the pool is empty, so almost all of the weight is excluded
                rest = weights.clone()
                rest[excluded + taken if distinct else excluded] = 0
                taken.append(self.draw(rest))
            results.append(taken)
        return results

    def _draw_many(self, weights: torch.Tensor, n: int) -> list[int]:
        # With replacement, torch inverts a cumulative sum, in which fp32 would lose the tail of a large vocabulary.
        # MPS has no fp64.
        device = torch.device("cpu") if weights.device.type == "mps" else weights.device
        weights = weights.to(device, torch.float64)
        return torch.multinomial(weights, n, replacement=True, generator=self._generator(device)).tolist()

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]
