"""Timing the methods prompt by prompt."""

import time

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.prompts import tokenize
from .methods import PLAIN, Method


def measure_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: dict,
    methods: list[Method],
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[dict]:
    """Generate the answer to one prompt with every method in turn, and time each.

    The methods start with another one for every seed, so that a drifting machine hits all alike.

    Args:
        target: enabled.
        prompt: `{"messages": [...], "kind": ...}`.
        temperature: 0 for greedy decoding.
        seed: of the sampling, and of where the turn begins.

    Returns:
        One row per method: the seconds of the whole call, the new tokens, tokens_per_round, and for greedy methods the
        index of the first token that differs from plain generate's, or None.
    """
    input_ids = torch.tensor([tokenize(tokenizer, prompt["messages"])], device=target.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": max_new_tokens, **sampling}
    first = seed % len(methods)
    rows, texts = {}, {}
    for method in methods[first:] + methods[:first]:
        torch.manual_seed(seed)
        start = now(target.device)
        output = target.generate(input_ids, return_dict_in_generate=True, **settings, **method.arguments())
        seconds = now(target.device) - start
        texts[method.name] = output.sequences[0, input_ids.shape[1] :].tolist()
        rounds = output.get("rounds")
        rows[method.name] = {
            "kind": prompt["kind"],
            "seed": seed,
            "temperature": temperature,
            "method": method.name,
            "prompt_tokens": input_ids.shape[1],
            "new_tokens": len(texts[method.name]),
            "seconds": seconds,
            "tokens_per_round": output.tokens_per_round if rounds else None,
        }
    if not temperature:
        for name, row in rows.items():
            row["differs_at"] = first_difference(texts[name], texts[PLAIN])
    return [rows[method.name] for method in methods]


def first_difference(tokens: list[int], expected: list[int]) -> int | None:
    """The index of the first token that is not the expected one, or None."""
    if tokens == expected:
        return None
    pairs = enumerate(zip(tokens, expected))
    return next((i for i, (token, wanted) in pairs if token != wanted), min(len(tokens), len(expected)))


def now(device: torch.device) -> float:
    """Seconds, with everything the device was asked to do done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
