"""The rounds of a finished run with DDTree, in the form in which the page draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..output import GenerateDDTreeOutput
from ..tree import DraftTree


@dataclass(frozen=True)
class DraftedRound:
    """One round of decoding.

    Args:
        tree: what was drafted.
        path: the accepted nodes from the root down, the root included.
        bonus: the bonus token, or None if the text ended before it.
    """

    tree: DraftTree
    path: list[int]
    bonus: int | None


def drafted_rounds(output: object, prompt_length: int) -> list[DraftedRound] | None:
    """Return the rounds of an output of `generate`, or None if it has no trace of its rounds.

    Args:
        output: what `generate` returned for one prompt; the rounds are there with `tree_trace=True`.
        prompt_length: number of tokens of the prompt.
    """
    if not isinstance(output, GenerateDDTreeOutput) or output.rounds is None:
        return None
    sequence, root = output.sequences[0].tolist(), prompt_length
    drafted = []
    for entry in output.rounds:
        if entry.tree is None or entry.path is None:
            return None
        root += len(entry.path)  # the index of this round's bonus token, which is the next round's root
        bonus = sequence[root] if root < len(sequence) else None
        drafted.append(DraftedRound(entry.tree, entry.path, bonus))
    return drafted


def telling_round(rounds: Sequence[DraftedRound]) -> int:
    """Return the number, counted from 1, of the round whose picture shows most.

    This is the round that accepted most nodes among those that also rejected some, or among all if none rejected any.
    """
    best = max(range(len(rounds)), key=lambda i: (len(rounds[i].tree) > len(rounds[i].path), len(rounds[i].path)))
    return best + 1
