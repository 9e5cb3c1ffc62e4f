"""The speed pass: every method answers a prompt in turn, and each whole call is timed."""

from typing import Any

import torch

from ..output import Round
from ..target.timing import now
from .case import Case
from .exactness import exactness
from .methods import Method
from .rows import Row


def speed_rows(case: Case, methods: list[Method]) -> list[Row]:
    """Generate the answer to one prompt with every method in turn, and time each call.

    Another method begins for every seed, so that a machine whose speed drifts affects all methods alike.

    Args:
        case: the prompt and its settings.
        methods: the methods to compare, with plain generate among them.

    Returns:
        One row per method, in the given order: the seconds of the whole call, the new tokens, what `acceptance` says
        of the rounds, and for greedy decoding what `exactness` says of the text.
    """
    n_prompt, first = case.input_ids.shape[1], case.seed % len(methods)
    rows: dict[str, Row] = {}
    texts: dict[str, list[int]] = {}
    for method in methods[first:] + methods[:first]:
        torch.manual_seed(case.seed)
        start = now(case.target.device)
        output = case.target.generate(case.input_ids, **case.settings, **method.arguments())
        seconds = now(case.target.device) - start
        text = texts[method.name] = output.sequences[0, n_prompt:].tolist()
        rows[method.name] = {
            **case.row("speed", method),
            "new_tokens": len(text),
            "context_tokens": n_prompt + len(text),
            "seconds": seconds,
            **acceptance(output.get("rounds")),
        }
    if case.temperature == 0:
        for name, columns in exactness(case.target, case.input_ids, texts).items():
            rows[name].update(columns)
    return [rows[method.name] for method in methods]


def acceptance(rounds: list[Round] | None) -> dict[str, Any]:
    """Return what a text's rounds accepted.

    Args:
        rounds: the rounds of one answer. None or an empty list if there were none.

    Returns:
        "tokens_per_round" and "tree_size", means over the rounds, and "accepted_lengths": how many rounds accepted 0,
        1, 2, ... drafted tokens. All are None without rounds.
    """
    if not rounds:
        return {"tokens_per_round": None, "tree_size": None, "accepted_lengths": None}
    accepted = [r.accepted_length for r in rounds]
    return {
        "tokens_per_round": 1 + sum(accepted) / len(rounds),
        "tree_size": sum(r.tree_size for r in rounds) / len(rounds),
        "accepted_lengths": [accepted.count(length) for length in range(max(accepted) + 1)],
    }
