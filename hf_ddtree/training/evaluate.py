"""Tokens per round of a drafter through `model.generate`, per kind of prompt."""

from collections import defaultdict

import torch
from tqdm import tqdm
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from ..benchmark.methods import chain_generator
from ..generate import enable
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
    """tokens_per_round by kind of prompt and tree budget, over all rounds of a kind; "all" pools the kinds.

    Args:
        prompts: JSONL file or dataset id; see `read_prompts`.
        budgets: tree budgets; `CHAIN` for the single most probable path.
        temperature: 0 for greedy decoding.
    """
    if min(budgets) < 0:
        raise ValueError(f"--budgets {budgets}: a budget is at least 1, or {CHAIN} for the chain.")
    if CHAIN in budgets and isinstance(drafter, GenerationMixin):
        raise ValueError(f"--budgets {CHAIN}: the chain is measured for DFlash drafters; use budget 1 for a causal LM.")
    enable(target)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    emitted, rounds = defaultdict(int), defaultdict(int)
    for prompt in tqdm(read_prompts(prompts), unit="prompt"):
        input_ids = torch.tensor([tokenize(tokenizer, prompt["messages"])], device=target.device)
        for budget in budgets:
            torch.manual_seed(seed)
            generator = drafter
            if budget == CHAIN:
                generator = chain_generator(drafter, target)
            output = target.generate(
                input_ids,
                assistant_model=generator,
                tree_budget=max(1, budget),
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
                **sampling,
            )
            for kind in (prompt["kind"], "all"):
                emitted[kind, budget] += sum(r.accepted_length + 1 for r in output.rounds)
                rounds[kind, budget] += len(output.rounds)
    table = defaultdict(dict)
    for kind, budget in sorted(emitted):
        name = "chain" if budget == CHAIN else str(budget)
        table[kind][name] = round(emitted[kind, budget] / max(1, rounds[kind, budget]), 3)
    return dict(table)
