"""Running one random request of soak.py with and without a tree, and comparing everything that is returned."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from soak_cases import Case, drafter_model, drafter_of, inputs_of, model_of, settings_of
from transformers import LogitsProcessor
from transformers.generation import BaseStreamer

from hf_ddtree.comparison import first_difference

# A forward over a tree rounds otherwise than forwards over one token. Tiny models with large weights amplify this.
TOLERANCE = 1e-3  # relative to the largest entry
NEAR_TIE = 1e-4  # between the two largest scores

EQUAL, NEAR, SKIPPED, DIFFERENT, REFUSED = "equal", "near tie", "refused by plain generate", "different", "refused"


class Forced(LogitsProcessor):
    """Leaves one token at each place, so that plain `generate` follows a given text."""

    def __init__(self, tokens: list[int], prompt_length: int):
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids, scores):
        index = input_ids.shape[1] - self.prompt_length
        forced = torch.full_like(scores, -torch.inf)
        if index < len(self.tokens):
            forced[:, self.tokens[index]] = 0.0
        return forced


class Recording(BaseStreamer):
    """Keeps what it receives."""

    def __init__(self):
        self.values: list[Any] = []

    def put(self, value):
        self.values += value.flatten().tolist()

    def end(self):
        self.values.append("end")


def run(case: Case) -> dict[str, str]:
    """Return the outcome of a case, and in words what is different."""
    try:
        with defaults(case):
            plain, plain_stream = call(case, tree={})
    except Exception:
        return {"outcome": SKIPPED, "detail": traceback.format_exc(limit=-1)}
    try:
        with defaults(case):
            script = plain.sequences[0, case.padding :].tolist()
            tree, tree_stream = call(case, tree=tree_arguments(case, script))
            if not case.comparable:
                plain, plain_stream = call(case, tree={}, forced=new_tokens(tree, case))
    except Exception:
        return {"outcome": REFUSED, "detail": traceback.format_exc()}
    problem = difference(case, tree, plain)
    if problem is None and tree_stream != plain_stream:
        problem = f"streamed {tree_stream}, plain generate {plain_stream}"
    if problem is not None and is_near_tie(case, tree, plain):
        return {"outcome": NEAR, "detail": problem}
    return {"outcome": EQUAL if problem is None else DIFFERENT, "detail": problem or ""}


@contextmanager
def defaults(case: Case) -> Iterator[None]:
    """Set torch's default dtype and device inside the context. The models exist already."""
    model_of(case.family, case.attention)
    if case.drafter != "scripted":
        drafter_model(case.drafter, case.family, case.attention)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(case.default_dtype or before)
        torch.set_default_device(case.default_device)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def tree_arguments(case: Case, script: list[int]) -> dict[str, Any]:
    """Return the arguments that make a request a tree request."""
    return {
        "assistant_model": drafter_of(case, script),
        "tree_budget": case.tree_budget,
        "tree_sampling": case.tree_sampling,
    }


def call(case: Case, tree: dict[str, Any], forced: list[int] | None = None) -> tuple[Any, list | None]:
    """Return the output of one `generate` call, and what it streamed."""
    model, settings, inputs = model_of(case.family, case.attention), settings_of(case), inputs_of(case)
    if case.prior is not None:
        inputs = second_turn(case, inputs["input_ids"], tree)
    if forced is not None:
        settings["logits_processor"].append(Forced(forced, inputs["input_ids"].shape[1]))
    streamer = Recording() if case.streams else None
    torch.manual_seed(case.seed)
    output = model.generate(**inputs, **settings, **tree, streamer=streamer)
    return output, None if streamer is None else streamer.values


def second_turn(case: Case, ids: torch.Tensor, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a turn that continues the cache of a first one."""
    model = model_of(case.family, case.attention)
    prompt = (torch.arange(9, dtype=torch.long, device="cpu")[None] * 13 + case.seed) % 120 + 4
    first_tree: dict[str, Any] = {}
    if tree and case.prior != "plain":
        used_up = case.drafter in ("scripted", "chain")  # such a drafter serves one call
        first_tree = {**tree, "assistant_model": None if used_up else tree["assistant_model"]}
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "do_sample": False, "eos_token_id": None}
    first = model.generate(prompt, **options, **first_tree)
    if case.prior == "cropped":
        first.cache.crop(-3)
    return {"input_ids": torch.cat([first.sequences.to(ids.dtype), ids], dim=1), "cache": first.cache}


def new_tokens(output: Any, case: Case) -> list[int]:
    """Return the tokens after the prompt."""
    return output.sequences[0, output.sequences.shape[1] - len(output.scores) :].tolist()


def difference(case: Case, tree: Any, plain: Any) -> str | None:
    """Return the first difference between two outputs in words, or None."""
    if tree.sequences.tolist() != plain.sequences.tolist():
        place = first_difference(tree.sequences[0].tolist(), plain.sequences[0].tolist())
        return f"tokens differ at {place}: {tree.sequences[0].tolist()} and {plain.sequences[0].tolist()}"
    if tree.sequences.dtype != plain.sequences.dtype:
        return f"the tokens are {tree.sequences.dtype}, and {plain.sequences.dtype} in plain generate"
    chosen = zip(tree.scores, new_tokens(tree, case), strict=True)
    # processors may forbid every token. Greedy decoding then takes one of them, with and without a tree
    if not case.comparable and any(float(row[0, token]) == -torch.inf for row, token in chosen):
        return "a token has probability 0"
    names = ("scores", *case.outputs) if case.comparable else tuple(name for name in case.outputs if name != "scores")
    for name in names:
        pairs = zip(tensors(getattr(tree, name)), tensors(getattr(plain, name)), strict=True)
        if not all(is_close(actual, expected) for actual, expected in pairs):
            return f"{name} differ"
    return cache_difference(tree.cache, plain.cache)


def cache_difference(tree: Any, plain: Any) -> str | None:
    """Return in which layer two caches differ, or None."""
    for index, (layer, expected) in enumerate(zip(tree.layers, plain.layers, strict=True)):
        if type(layer) is not type(expected):
            return f"layer {index} of the cache is a {type(layer).__name__}, not a {type(expected).__name__}"
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            pairs = zip(tensors(getattr(layer, name, None)), tensors(getattr(expected, name, None)), strict=True)
            if not all(is_close(actual, reference) for actual, reference in pairs):
                return f"{name} of layer {index} of the cache differ"
    return None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for rounding."""
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), expected.isfinite()):
        return False
    finite = expected.isfinite()
    if not bool(finite.any()):
        return True
    scale = max(1.0, float(expected[finite].abs().max()))
    return float((actual[finite] - expected[finite]).abs().max()) <= TOLERANCE * scale


def is_near_tie(case: Case, tree: Any, plain: Any) -> bool:
    """Return whether rounding explains the first difference: a tie of the best scores, or at the cut of a warper."""
    place = first_difference(new_tokens(tree, case), new_tokens(plain, case))
    if place is None:
        rows = list(zip(tree.scores, plain.scores, strict=True))
        return any(cut_differs(*row) for row in rows) and all(is_close(*row) or cut_differs(*row) for row in rows)
    if place >= min(len(tree.scores), len(plain.scores)):
        return False
    best = plain.scores[place][0].topk(2).values
    return bool(best[0] - best[1] < NEAR_TIE) or cut_differs(tree.scores[place], plain.scores[place])


def cut_differs(scores: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether a warper such as top-k kept different tokens, all of them close to the last one that it kept."""
    if scores.shape != others.shape or torch.equal(scores.isfinite(), others.isfinite()):
        return False
    return all(
        bool((kept[kept.isfinite() & ~dropped.isfinite()] - kept[kept.isfinite()].min() < NEAR_TIE).all())
        for kept, dropped in ((scores, others), (others, scores))
    )
