"""The tokens per round of a drafter inside `model.generate`, by kind of prompt."""

from collections import defaultdict
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.chain import chain_drafter
from ..enable import enable
from .acceptance import CHAIN
from .prompts import read_prompts, tokenize


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    prompts: str,
    budgets: list[int],
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Return the tokens per round by kind of prompt and tree budget. The kind "all" pools the rounds of all kinds.

    Args:
        target: it is enabled and stays so.
        tokenizer: the target's.
        drafter: what `load_drafter` returns.
        prompts: a JSONL file or dataset id, see `read_prompts`.
        budgets: tree budgets, or `CHAIN` for the chain of the most probable tokens.
        temperature: 0 means greedy decoding.
        max_new_tokens: maximum length of an answer.
        seed: global seed of every answer.

    Raises:
        ValueError: if a budget is negative, or if it is `CHAIN` and the drafter has no block to take a chain from.
    """
    _check_budgets(budgets, drafter)
    enable(target)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature != 0}
    if temperature:
        settings.update(temperature=temperature, top_k=0)
    accepted: dict[tuple[str, int], list[int]] = defaultdict(list)  # the accepted length of every round
    for prompt in tqdm(read_prompts(prompts), unit="prompt"):
        token_ids = tokenize(tokenizer, prompt["messages"])
        input_ids = torch.tensor([token_ids], dtype=torch.long, device=target.device)
        for budget in budgets:
            torch.manual_seed(seed)
            lengths = _accepted_lengths(target, drafter, input_ids, budget, settings)
            for kind in (prompt["kind"], "all"):
                accepted[kind, budget] += lengths
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, budget), lengths in sorted(accepted.items()):
        name = "chain" if budget == CHAIN else str(budget)
        table[kind][name] = round((sum(lengths) + len(lengths)) / max(1, len(lengths)), 3)
    return dict(table)


def _check_budgets(budgets: list[int], drafter: PreTrainedModel) -> None:
    if min(budgets) < 0:
        raise ValueError(
            f"--budgets {' '.join(map(str, budgets))} has a negative budget, and a tree needs at least one node. "
            f"Choose budgets of at least 1, or {CHAIN} for the chain."
        )
    if CHAIN in budgets and isinstance(drafter, GenerationMixin):
        raise ValueError(
            f"--budgets {CHAIN} is the chain of a DFlash drafter's block, and a {type(drafter).__name__} has no block. "
            "Use budget 1 for a causal LM."
        )


def _accepted_lengths(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    input_ids: torch.Tensor,
    budget: int,
    settings: dict[str, Any],
) -> list[int]:
    """Generate one answer and return the accepted length of each round."""
    output = target.generate(
        input_ids,
        assistant_model=chain_drafter(drafter, target) if budget == CHAIN else drafter,
        tree_budget=max(1, budget),
        return_dict_in_generate=True,
        **settings,
    )
    return [r.accepted_length for r in output.rounds]
