"""The measurements of one process, and the file its rows go to."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .measure import measure_prompt
from .methods import Method
from .stages import measure_stages

TIMED_PROMPTS = 4  # their stages are timed; the cost of a round hardly depends on the prompt


def warm_up(target: PreTrainedModel, methods: list[Method]) -> None:
    """Call every method once: the first call pays for checks and allocations."""
    for method in methods:
        target.generate(torch.tensor([[1, 2, 3]]).to(target.device), max_new_tokens=8, **method.arguments())


def measure_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[tuple[int, dict]],
    methods: list[Method],
    temperatures: list[float],
    max_new_tokens: int,
) -> Iterator[list[dict]]:
    """The rows of one prompt after the other, behind a progress bar.

    Args:
        prompts: with their seeds, which are their places in the whole list.
    """
    for seed, prompt in tqdm(prompts, unit="prompt", disable=not prompts or prompts[0][0] > 0):
        rows = []
        for temperature in temperatures:
            request = (target, tokenizer, prompt, methods, temperature, max_new_tokens, seed)
            rows += measure_prompt(*request)
            if seed < TIMED_PROMPTS:
                rows += measure_stages(*request)
        yield rows


class RowFile:
    """A JSONL file that rows are appended to as they are measured, so that an interrupted run keeps them.

    Args:
        path: its folder is made if it is missing.
    """

    def __init__(self, path: str):
        self.path = Path(path)

    def clear(self) -> None:
        """Start with an empty file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")

    def append(self, rows: list[dict]) -> None:
        """Add a line per row: in one write, so that other processes' lines do not get in between."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
