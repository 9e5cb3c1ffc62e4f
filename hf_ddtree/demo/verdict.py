"""Are the two texts the same, and if not, why?"""

import math
from dataclasses import dataclass

import torch

from .models import Loaded
from .request import Request
from .text import visible

IDENTICAL, DISTRIBUTION, TIE, DIFFERENT, STOPPED = "identical", "same distribution", "near-tie", "different", "stopped"
# rounding alone does not choose a token further below the best one than this, in steps of the dtype
MOST_STEPS = 4


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison: `kind` in a word, `text` in a sentence."""

    kind: str
    text: str


def judge(
    loaded: Loaded, request: Request, prompt_ids: torch.Tensor, plain: list[int], drafted: list[int], stopped: bool
) -> Verdict:
    """Compare the new tokens of plain generation with those of DDTree.

    Args:
        prompt_ids: `[1, S]`, what both continue.
        stopped: the visitor ended a run, so that only as many tokens as both have can be compared.
    """
    if request.policy not in (None, "target"):
        text = (
            f"These are two draws from it: the policy “{request.policy}” keeps the model's distribution exactly, but uses "
            "the random numbers differently. With the policy “target” the same seed gives the same text."
        )
        return Verdict(STOPPED, "") if stopped else Verdict(DISTRIBUTION, text)
    compared = min(len(plain), len(drafted)) if stopped else max(len(plain), len(drafted))
    place = next((i for i in range(compared) if plain[i : i + 1] != drafted[i : i + 1]), None)
    if place is None and stopped:
        return Verdict(STOPPED, f"The {compared} tokens that both have are the same." if compared else "")
    if place is None:
        how = "" if request.sampling is None else f", same seed {request.sampling.seed}, policy “target”"
        return Verdict(IDENTICAL, f"All {compared} tokens are the same{how}.")
    return _explain(loaded, request, prompt_ids, plain, drafted, place)


def _explain(loaded, request, prompt_ids, plain, drafted, place) -> Verdict:
    """The verdict on texts that part after `place` equal tokens."""
    names = [_name(loaded, tokens, place) for tokens in (plain, drafted)]
    where = f"Token {place + 1} differs: {names[0]} plainly, {names[1]} with the tree."
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    if request.sampling is not None:
        text = (
            f"{where} In {dtype} a forward over many tokens rounds differently from one over a single token, and a draw near "
            "the border between two tokens can fall on the other side. Both are draws from the same distribution."
        )
        return Verdict(TIE if loaded.model.dtype != torch.float32 else DIFFERENT, text)
    scores = _scores(loaded, request, prompt_ids, plain[:place])
    best, second = scores.topk(2).values.tolist()
    step = _step(best, loaded.model.dtype)
    text = (
        f"{where} There the model's top-1 and top-2 scores are {best - second:.3g} apart ({best:.4g} and {second:.4g})"
    )
    if place < len(drafted) and best - scores[drafted[place]] <= MOST_STEPS * step:
        return Verdict(TIE, f"{text}: a near-tie, as {dtype} counts in steps of {step:.2g} here, and either may win.")
    return Verdict(DIFFERENT, f"{text}, which rounding in {dtype} does not explain. Please report it.")


def _name(loaded: Loaded, tokens: list[int], place: int) -> str:
    if place >= len(tokens):
        return "the end"
    return f"“{visible(loaded.tokenizer.decode([tokens[place]]))}”"


def _scores(loaded: Loaded, request: Request, prompt_ids, new_tokens: list[int]) -> torch.Tensor:
    """`[V]`: the scores of the next token, after the request's processors, as plain generation sees them."""
    prefix = torch.cat([prompt_ids, prompt_ids.new_tensor([new_tokens])], dim=1)
    settings = {**request.settings(), "max_new_tokens": 1, "output_scores": True}
    output = loaded.model.generate(prefix, attention_mask=torch.ones_like(prefix), **settings)
    return output.scores[0][0].float()


def _step(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of `dtype` at `value`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(value) or 1.0))
