"""Where the time of a round goes: a pass of its own, because waiting for the device between stages costs speed.

Its rows stand in the same file as the others, marked "pass": "timing", since they need the same description of prompt,
method and machine, and one file cannot lose its other half.
"""

from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .measure import generation_settings, now, tokenized
from .methods import Method

STAGES = ("draft", "verify", "walk", "commit")
FORWARDS = ("drafter forward", "target forward")


def measure_stages(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: dict,
    methods: list[Method],
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[dict]:
    """Generate once more with every method that decodes in rounds, and time their stages.

    "draft" is everything that makes the tree, the drafter's forward and the head on its states included; "verify" is
    the mask and the target's forward; "walk" chooses tokens; "commit" keeps what was accepted. The two forwards within
    these are timed as well, so that the rest, the host's share, can be told from them.

    Returns:
        One row per method: "rounds" and, summed over them, the "seconds" of every stage and forward.
    """
    input_ids = tokenized(target, tokenizer, prompt)
    rows = []
    for method in methods:
        arguments = method.arguments()
        if "tree_budget" not in arguments:
            continue
        torch.manual_seed(seed)
        with forward_times(target, drafting_modules(target, arguments["assistant_model"])) as times:
            settings = generation_settings(temperature, max_new_tokens)
            rounds = target.generate(input_ids, tree_timing=True, **settings, **arguments).rounds
        seconds = {stage: sum(r.seconds[stage] for r in rounds) for stage in STAGES}
        seconds["drafter forward"] = sum(times["drafter forward"])
        seconds["target forward"] = sum(times["target forward"][1:])  # the first is the prefill
        rows.append(
            {
                "pass": "timing",
                "kind": prompt["kind"],
                "seed": seed,
                "temperature": temperature,
                "method": method.name,
                "tree_budget": method.tree_budget,
                "prompt_tokens": input_ids.shape[1],
                "rounds": len(rounds),
                "seconds": seconds,
            }
        )
    return rows


def drafting_modules(target: PreTrainedModel, assistant) -> list[nn.Module]:
    """The modules that are called to draft: the drafter, and the head where that is outside of it."""
    if assistant is None:
        return []
    drafter = assistant if isinstance(assistant, nn.Module) else assistant.drafter
    modules = [drafter, drafter.get_output_embeddings(), target.get_output_embeddings()]
    return [module for module in modules if module is not None]


@contextmanager
def forward_times(target: PreTrainedModel, drafting: list[nn.Module]):
    """Yields the seconds of each forward of the target, and of the modules that draft, in lists by name in `FORWARDS`.

    A forward within another one, such as the head's within the target's, counts as part of the outer one.
    """
    times = {name: [] for name in FORWARDS}
    running = []

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
