"""The timing pass: where the time of a round goes.

It is a pass of its own, because waiting for the device between stages costs speed. Its rows stand in the same file as
those of the speed pass, marked "pass": "timing".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..target.timing import now
from .case import Case
from .methods import Method
from .rows import Row

STAGES = ("draft", "verify", "walk", "commit")
FORWARDS = ("drafter forward", "target forward")


def timing_rows(case: Case, methods: list[Method]) -> list[Row]:
    """Generate once more with every method that decodes in rounds, and time the stages.

    "draft" is everything that makes the tree, including the drafter's forward and the head on its states. "verify" is
    the mask and the target's forward, "walk" chooses the tokens, and "commit" keeps the accepted path. The two forwards
    inside these stages are timed as well. The rest of a round is the host's share.

    Args:
        case: the prompt and its settings. Its target must be warm, because forwards of the check on first use would
            count.
        methods: all methods. Those without rounds are skipped.

    Returns:
        One row per method: the number of "rounds" and, summed over them, the "seconds" of each stage and forward.
    """
    rows = []
    for method in methods:
        arguments = method.arguments()
        if "tree_budget" not in arguments:
            continue
        torch.manual_seed(case.seed)
        modules = drafting_modules(case.target, arguments["assistant_model"])
        with forward_times(case.target, modules) as times:
            output = case.target.generate(case.input_ids, tree_timing=True, **case.settings, **arguments)
        rounds = output.rounds
        seconds = {stage: sum(r.seconds[stage] for r in rounds) for stage in STAGES}
        seconds["drafter forward"] = sum(times["drafter forward"])
        seconds["target forward"] = sum(times["target forward"][1:])  # the first one is the prefill
        rows.append({**case.row("timing", method), "rounds": len(rounds), "seconds": seconds})
    return rows


def drafting_modules(target: PreTrainedModel, assistant_model: Any) -> list[nn.Module]:
    """Return the modules that are called to draft: the drafter's model, and the head if it is outside of that model.

    Args:
        target: the target.
        assistant_model: what `generate` gets: a model, a `DFlashDrafter`, or None for prompt look-up.
    """
    if assistant_model is None:
        return []
    model: Any = assistant_model if isinstance(assistant_model, nn.Module) else assistant_model.model
    modules = [model, model.get_output_embeddings(), target.get_output_embeddings()]
    return [module for module in modules if module is not None]


@contextmanager
def forward_times(target: PreTrainedModel, drafting: list[nn.Module]) -> Iterator[dict[str, list[float]]]:
    """Time every forward of the target and of the drafting modules inside the context.

    Yields the seconds of each forward in lists by their name in `FORWARDS`. A forward inside another one, such as the
    head's inside the target's, counts as part of the outer one.

    Args:
        target: the target.
        drafting: the modules that are called to draft.
    """
    times: dict[str, list[float]] = {name: [] for name in FORWARDS}
    running: list[float] = []

    def start(module, args):
        running.append(now(target.device))

    def stop(module, args, outputs):
        seconds = now(target.device) - running.pop()
        if not running:
            times["target forward" if module is target else "drafter forward"].append(seconds)

    handles = []
    for module in [target, *drafting]:
        handles += [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
