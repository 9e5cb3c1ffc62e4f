"""The measurements of one process: every method answers every prompt."""

from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .case import Case, prompt_ids
from .methods import Method
from .rows import Row
from .speed import speed_rows
from .stages import timing_rows

N_TIMED_PROMPTS = 4  # prompts in the timing pass, because the cost of a round hardly depends on the prompt


def warm_up(target: PreTrainedModel, methods: list[Method]) -> None:
    """Call every method once, because the first call checks the model and allocates memory.

    Args:
        target: the enabled target.
        methods: the methods to compare.
    """
    for method in methods:
        prompt = torch.tensor([[1, 2, 3]], dtype=torch.long, device=target.device)
        target.generate(prompt, max_new_tokens=8, **method.arguments())


def rows_by_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[tuple[int, dict[str, Any]]],
    methods: list[Method],
    temperatures: list[float],
    max_new_tokens: int,
) -> Iterator[list[Row]]:
    """Measure one prompt after the other, behind a progress bar, and yield the rows of each.

    Args:
        target: the enabled target.
        tokenizer: its tokenizer.
        prompts: pairs (seed, prompt). The seed is the prompt's place in the list of all processes.
        methods: the methods to compare.
        temperatures: the sampling temperatures, 0 for greedy decoding.
        max_new_tokens: the largest number of new tokens per answer.
    """
    for seed, prompt in tqdm(prompts, unit="prompt", disable=not prompts or prompts[0][0] > 0):
        rows = []
        input_ids = prompt_ids(target, tokenizer, prompt)
        for temperature in temperatures:
            case = Case(target, input_ids, prompt["kind"], seed, temperature, max_new_tokens)
            rows += speed_rows(case, methods)
            if seed < N_TIMED_PROMPTS:
                rows += timing_rows(case, methods)
        yield rows
