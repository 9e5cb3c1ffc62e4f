"""What the page shows about a comparison, as HTML. Every text of a model or a visitor is escaped."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .form import Form
from .layout import MAX_DRAWN_NODES
from .rounds import DraftedRound
from .run import Run
from .session import Comparison
from .text import escape
from .tree_svg import tree_svg
from .verdict import DIFFERENT, IDENTICAL, STOPPED, Verdict

NOT_YET = "–"  # shown in place of a figure that a run does not have yet
CONTEXT_TOKENS = 24  # shown of the text before a tree
MOODS = {IDENTICAL: "good", DIFFERENT: "bad"}  # the verdict's colour; every other kind is "neutral"
MEANINGS = {
    "root": "the last token of the text so far",
    "accepted": "drafted and chosen by the target",
    "rejected": "drafted but not chosen",
    "bonus": "the token that the target chose instead",
}
LEGEND = "".join(
    [
        '<p class="legend">',
        *(f'<span><span class="chip {kind}">{kind}</span> {meaning}</span>' for kind, meaning in MEANINGS.items()),
        "<span>A percentage is the drafter's estimate that the text reaches the node.</span></p>",
    ]
)


def conversation_html(messages: Sequence[dict[str, str]]) -> str:
    """Return the messages, one below the other."""
    turns = (f'<p class="turn {escape(m["role"])}" dir="auto">{escape(m["content"])}</p>' for m in messages)
    return f'<div class="conversation">{"".join(turns)}</div>' if messages else ""


def stats_html(run: Run | None, form: Form) -> str:
    """Return the figures below a text: speeds and, after the end of a run with DDTree, means over its rounds."""
    if run is None or run.first_token_seconds is None:
        return _figures([("tokens/s", NOT_YET), ("first token", NOT_YET), ("tokens", NOT_YET)])
    figures = [
        ("tokens/s", f"{run.tokens_per_second:.1f}"),
        ("first token", f"{run.first_token_seconds:.2f} s"),
        ("tokens", str(len(run.token_ids))),
    ]
    if run.rounds:
        n_rounds = len(run.rounds)
        tokens_per_round = sum(len(entry.path) for entry in run.rounds) / n_rounds
        nodes_per_round = sum(len(entry.tree) - 1 for entry in run.rounds) / n_rounds
        figures += [
            ("rounds", str(n_rounds)),
            ("tokens_per_round", f"{tokens_per_round:.2f}"),
            ("tree budget used", f"{nodes_per_round:.1f} of {form.tree_budget}"),
        ]
    return _figures(figures)


def _figures(figures: list[tuple[str, str]]) -> str:
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="stats">{"".join(cells)}</dl>'


def verdict_html(comparison: Comparison) -> str:
    """Return the verdict with the speedup, or which run is in progress."""
    verdict = comparison.verdict
    if verdict is None:
        run = "plain generation" if comparison.drafted is None else "DDTree"
        return message_html(f"Running {run} …")
    kind, speed = escape(verdict.kind.capitalize()), _speed_html(comparison, verdict)
    mood = MOODS.get(verdict.kind, "neutral")
    return f'<div class="verdict {mood}"><b>{kind}.</b> {escape(verdict.text)} {speed}</div>'


def _speed_html(comparison: Comparison, verdict: Verdict) -> str:
    """Return the ratio of the speeds, or nothing unless both runs are complete."""
    plain, drafted = comparison.plain, comparison.drafted
    if drafted is None or not drafted.rounds or verdict.kind == STOPPED:
        return ""
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    speed = f'<b class="speed">{ratio:.2f}×</b> the speed of plain generation.'
    if ratio < 1:
        speed += " DDTree was slower here. Try another drafter, tree budget or prompt."
    return speed


def message_html(text: str, mood: str = "neutral") -> str:
    """Return a message in a box. The mood of an error is "bad"."""
    return f'<div class="verdict {mood}">{escape(text)}</div>'


def round_html(
    rounds: Sequence[DraftedRound], number: int, token_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the tree of one round, with a sentence about it and the text before it.

    Args:
        rounds: all rounds of the run.
        number: which round, counted from 1.
        token_ids: the new tokens of the whole run.
        tokenizer: decodes the tokens.
    """
    entry = rounds[number - 1]
    root = sum(len(earlier.path) for earlier in rounds[: number - 1])  # its index among the new tokens
    context = tokenizer.decode(token_ids[max(0, root + 1 - CONTEXT_TOKENS) : root + 1])
    picture = tree_svg(entry.tree, entry.path, tokenizer, entry.bonus)
    return (
        f'<div class="round"><p>Round {number} of {len(rounds)}: {_round_sentences(entry)}</p>'
        f'<p class="context" dir="auto">… {escape(context)}</p><div class="tree">{picture}</div></div>'
    )


def _round_sentences(entry: DraftedRound) -> str:
    drafted, accepted = len(entry.tree) - 1, len(entry.path) - 1
    end = ". The text ends here." if entry.bonus is None else " and then chose one more token itself."
    sentences = f"the target accepted {accepted} of {drafted} drafted nodes{end}"
    if drafted > MAX_DRAWN_NODES:
        sentences += (
            " Only the accepted path and the nodes that were drafted first are drawn. +n beside a node counts the "
            "nodes below it that are not drawn."
        )
    return sentences
