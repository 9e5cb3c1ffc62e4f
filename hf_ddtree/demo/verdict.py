"""Whether plain generation and DDTree wrote the same text, and the reason if they did not."""

from dataclasses import dataclass

import torch

from ..comparison import first_difference, ulp
from .form import Form
from .models import Loaded
from .text import visible

IDENTICAL, DISTRIBUTION, TIE, DIFFERENT, STOPPED = "identical", "same distribution", "near-tie", "different", "stopped"
# Rounding does not select a token whose score is further below the best score than this many units in the last place.
MAX_ULPS = 4


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison: `kind` is one of the constants above, `text` explains it to a visitor."""

    kind: str
    text: str


def judge(
    loaded: Loaded, form: Form, prompt_ids: torch.Tensor, plain: list[int], drafted: list[int], stopped: bool
) -> Verdict:
    """Return the verdict on two texts.

    Args:
        loaded: the models that wrote the texts.
        form: the settings of both runs.
        prompt_ids: `[1, S]`, the prompt of both texts.
        plain: the new tokens of plain generation.
        drafted: the new tokens of DDTree.
        stopped: the visitor stopped a run, so only the tokens that both texts have can be compared.
    """
    if form.policy not in (None, "target"):
        return Verdict(STOPPED, "") if stopped else Verdict(DISTRIBUTION, _two_draws(form))
    compared = min(len(plain), len(drafted)) if stopped else max(len(plain), len(drafted))
    place = first_difference(plain[:compared], drafted[:compared])
    if place is not None:
        return _explain(loaded, form, prompt_ids, plain, drafted, place)
    if stopped:
        return Verdict(STOPPED, f"Both texts start with the same {compared} tokens." if compared else "")
    how = "" if form.sampling is None else f", with the same seed {form.seed} and the policy “target”"
    return Verdict(IDENTICAL, f"All {compared} tokens are the same{how}.")


def _two_draws(form: Form) -> str:
    return (
        f"The texts are two draws from it. The policy “{form.policy}” keeps the target's distribution exactly, but it "
        "uses the random numbers differently. With the policy “target”, the same seed gives the same text."
    )


def _explain(
    loaded: Loaded, form: Form, prompt_ids: torch.Tensor, plain: list[int], drafted: list[int], place: int
) -> Verdict:
    """Return the verdict on two texts whose first `place` tokens are equal and whose next tokens differ."""
    names = [_name(loaded, tokens, place) for tokens in (plain, drafted)]
    where = f"Token {place + 1} differs: {names[0]} with plain generation, {names[1]} with DDTree."
    if form.sampling is not None:
        return _explain_draws(where, loaded.model.dtype)
    scores = _scores(loaded, form, prompt_ids, plain[:place])
    distance = float(scores.max() - scores[drafted[place]]) if place < len(drafted) else None
    return _explain_scores(where, scores, distance, loaded.model.dtype)


def _explain_draws(where: str, dtype: torch.dtype) -> Verdict:
    """Return the verdict on two sampled texts that differ although they used the same random numbers."""
    name = _dtype_name(dtype)
    if dtype == torch.float32:
        reason = (
            f"Both draws used the same random numbers, and {name} rounding does not explain this. Please report it."
        )
        return Verdict(DIFFERENT, f"{where} {reason}")
    reason = (
        f"In {name}, a forward over many tokens rounds differently from a forward over one token. A draw near the "
        "border between two tokens can then select the other one. Both texts are draws from the same distribution."
    )
    return Verdict(TIE, f"{where} {reason}")


def _explain_scores(where: str, scores: torch.Tensor, distance: float | None, dtype: torch.dtype) -> Verdict:
    """Return the verdict on two greedy texts.

    Args:
        where: the sentence that says which tokens differ.
        scores: `[V]`, the target's scores of the first token that differs.
        distance: how far the score of the token of DDTree is below the best score. None if its text has ended.
        dtype: the target's dtype.
    """
    best, second = scores.topk(2).values.tolist()
    step = ulp(best, dtype)
    gap = f"{best - second:.3g} apart ({best:.4g} and {second:.4g})"
    text = f"{where} There the target's top-1 and top-2 scores are {gap}."
    if distance is not None and distance <= MAX_ULPS * step:
        reason = f"This is a near-tie: {_dtype_name(dtype)} has steps of {step:.2g} here, so rounding decides."
        return Verdict(TIE, f"{text} {reason}")
    return Verdict(DIFFERENT, f"{text} {_dtype_name(dtype)} rounding does not explain this. Please report it.")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(loaded: Loaded, tokens: list[int], place: int) -> str:
    if place >= len(tokens):
        return "the end of the text"
    return f"“{visible(loaded.tokenizer.decode([tokens[place]]))}”"


def _scores(loaded: Loaded, form: Form, prompt_ids: torch.Tensor, new_tokens: list[int]) -> torch.Tensor:
    """Return `[V]`: the scores of the next token in plain generation, after the logits processors of the form."""
    prefix = torch.cat([prompt_ids, prompt_ids.new_tensor([new_tokens])], dim=1)
    settings = {**form.settings(), "max_new_tokens": 1, "output_scores": True}
    output = loaded.model.generate(prefix, attention_mask=torch.ones_like(prefix), **settings)
    return output.scores[0][0].float()
