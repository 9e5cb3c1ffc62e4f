"""Timing the methods prompt by prompt, and what their texts and rounds were."""

import math
import time

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..output import Round
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
        One row per method: the seconds of the whole call, the new tokens, what `acceptance` says of the rounds, and for
        greedy decoding what `exactness` says of the text.
    """
    input_ids = tokenized(target, tokenizer, prompt)
    settings = generation_settings(temperature, max_new_tokens)
    first = seed % len(methods)
    rows, texts = {}, {}
    for method in methods[first:] + methods[:first]:
        torch.manual_seed(seed)
        start = now(target.device)
        output = target.generate(input_ids, **settings, **method.arguments())
        seconds = now(target.device) - start
        text = texts[method.name] = output.sequences[0, input_ids.shape[1] :].tolist()
        rows[method.name] = {
            "pass": "speed",
            "kind": prompt["kind"],
            "seed": seed,
            "temperature": temperature,
            "method": method.name,
            "tree_budget": method.tree_budget,
            "prompt_tokens": input_ids.shape[1],
            "new_tokens": len(text),
            "context_tokens": input_ids.shape[1] + len(text),
            "seconds": seconds,
            **acceptance(output.get("rounds")),
        }
    if not temperature:
        for name, found in exactness(target, input_ids, texts).items():
            rows[name].update(found)
    return [rows[method.name] for method in methods]


def tokenized(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: dict) -> torch.Tensor:
    """`[1, S]`: the prompt's tokens, where the target is."""
    return torch.tensor([tokenize(tokenizer, prompt["messages"])], device=target.device)


def generation_settings(temperature: float, max_new_tokens: int) -> dict:
    """The keyword arguments of `generate` that all methods share."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **sampling}


def acceptance(rounds: list[Round] | None) -> dict:
    """Means over the rounds, and how many of them accepted 0, 1, 2, ... drafted tokens; None without rounds."""
    if not rounds:
        return {"tokens_per_round": None, "tree_size": None, "accepted_lengths": None}
    accepted = [r.accepted_length for r in rounds]
    return {
        "tokens_per_round": 1 + sum(accepted) / len(rounds),
        "tree_size": sum(r.tree_size for r in rounds) / len(rounds),
        "accepted_lengths": [accepted.count(length) for length in range(max(accepted) + 1)],
    }


def exactness(target: PreTrainedModel, prompt: torch.Tensor, texts: dict[str, list[int]]) -> dict[str, dict]:
    """Where greedy texts leave plain generate's, and how far from a tie that is.

    Args:
        prompt: `[1, S]` int64.
        texts: the new tokens by method.

    Returns:
        By method "differs_at": the index of the first other token, None if the texts are equal. Where they differ also
        "gap": how far the other token's logit lies below the maximum in plain generate, there and after the logits
        processors; 0 is an exact tie. "gap_ulps": the same in units of the last place of that maximum in the target's
        dtype. Rounding makes gaps of a few; they are infinite if a text only ends there.
    """
    places = {name: first_difference(tokens, texts[PLAIN]) for name, tokens in texts.items()}
    last = max((index for index in places.values() if index is not None), default=None)
    if last is None:
        return {name: {"differs_at": None} for name in texts}
    # once more, because keeping them would have slowed down the plain generate that was timed
    scores = target.generate(prompt, **generation_settings(0.0, last + 1), output_scores=True).scores
    result = {}
    for name, index in places.items():
        result[name] = {"differs_at": index}
        if index is not None:
            ends = index >= min(len(texts[name]), len(texts[PLAIN]))
            gap = (math.inf, math.inf) if ends else gap_below(scores[index][0], texts[name][index], target.dtype)
            result[name] |= dict(zip(("gap", "gap_ulps"), gap))
    return result


def gap_below(scores: torch.Tensor, token: int, dtype: torch.dtype) -> tuple[float, float]:
    """How far a token's score lies below the maximum, and the same in units of the maximum's last place in `dtype`."""
    best = float(scores.max())
    gap = best - float(scores[token])
    # frexp: 0.5 <= |mantissa| < 1, while eps is the last place of numbers from 1 to 2
    return gap, gap / (torch.finfo(dtype).eps * 2.0 ** (math.frexp(best)[1] - 1))


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
