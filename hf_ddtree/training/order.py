"""Which sequences every step trains on: a function of the seed and the number of the step alone."""

from collections.abc import Iterator
from functools import lru_cache

import torch

from .config import TrainConfig
from .data import Sequence

POOL = 32  # batches that are sorted by length together, which keeps both the padding and the effect on the order small


def epoch_batches(sequences: list[Sequence], batch_size: int, seed: int) -> list[list[int]]:
    """Split one epoch into batches of sequences of similar length, in random order.

    Args:
        sequences: all training sequences.
        batch_size: sequences per batch. The longest sequences of the last pool are left out if they do not fill one.
        seed: the only source of randomness.

    Returns:
        The indices of the sequences of each batch.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(len(sequences), generator=generator, dtype=torch.long, device="cpu").tolist()
    pool = POOL * batch_size
    result = []
    for start in range(0, len(order), pool):
        part = sorted(order[start : start + pool], key=lambda i: len(sequences[i].tokens))
        result += [part[i : i + batch_size] for i in range(0, len(part) - batch_size + 1, batch_size)]
    shuffled = torch.randperm(len(result), generator=generator, dtype=torch.long, device="cpu")
    return [result[i] for i in shuffled.tolist()]


class BatchOrder:
    """The batches of every step for one of several processes.

    All processes count the batches of the whole run together. An epoch ends when all its batches are used, which may
    be in the middle of a step.

    Args:
        sequences: all training sequences.
        config: gives the seed, the batch size and the batches per step and process.
        process_index: this process, from 0.
        num_processes: the number of processes.
    """

    def __init__(self, sequences: list[Sequence], config: TrainConfig, process_index: int = 0, num_processes: int = 1):
        self._sequences = sequences
        self._seed = config.seed
        self._accumulate = config.accumulate
        self._offset = process_index * config.accumulate
        self._per_step = num_processes * config.accumulate
        # a step may touch two epochs
        self._epoch = lru_cache(maxsize=2)(
            lambda number: epoch_batches(sequences, config.batch_size, config.seed + number)
        )

    def step_batches(self, step: int) -> Iterator[tuple[list[Sequence], torch.Generator]]:
        """Yield the batches of a step, each with a generator for the random choices in that batch.

        Args:
            step: the number of the step, from 0.
        """
        per_epoch = len(self._epoch(0))
        first = step * self._per_step + self._offset
        for number in range(first, first + self._accumulate):
            epoch, position = divmod(number, per_epoch)
            generator = torch.Generator("cpu").manual_seed(self._seed + 1_000_003 * (number + 1))
            yield [self._sequences[i] for i in self._epoch(epoch)[position]], generator
