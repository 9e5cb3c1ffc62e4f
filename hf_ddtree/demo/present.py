"""What the page says about a comparison, as HTML in which every text of a model or a visitor is escaped."""

from transformers import PreTrainedTokenizerBase

from .request import Request
from .session import Comparison, DraftedRound, Run
from .text import escape
from .tree_svg import MOST_NODES, tree_svg
from .verdict import DIFFERENT, IDENTICAL

CONTEXT_TOKENS = 24  # of the text before a tree


def conversation_html(messages: list[dict]) -> str:
    """The messages, one under the other."""
    turns = (f'<p class="turn {escape(m["role"])}" dir="auto">{escape(m["content"])}</p>' for m in messages)
    return f'<div class="conversation">{"".join(turns)}</div>' if messages else ""


def stats_html(run: Run | None, request: Request) -> str:
    """The figures below a text."""
    if run is None or not run.token_ids:
        return _figures([("tokens/s", "–"), ("first token", "–"), ("tokens", "–")])
    figures = [
        ("tokens/s", f"{run.tokens_per_second:.1f}"),
        ("first token", f"{run.first_token_seconds:.2f} s"),
        ("tokens", str(len(run.token_ids))),
    ]
    if run.rounds:
        n_rounds = len(run.rounds)
        per_round = sum(len(entry.path) for entry in run.rounds) / n_rounds
        nodes = sum(len(entry.tree) - 1 for entry in run.rounds) / n_rounds
        figures += [
            ("rounds", str(n_rounds)),
            ("tokens_per_round", f"{per_round:.2f}"),
            ("budget used", f"{nodes:.1f} of {request.tree_budget}"),
        ]
    return _figures(figures)


def _figures(figures: list[tuple[str, str]]) -> str:
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="stats">{"".join(cells)}</dl>'


def verdict_html(comparison: Comparison) -> str:
    """The verdict in a box, with the ratio of the speeds of two complete runs."""
    verdict = comparison.verdict
    if verdict is None:
        run = "plain generation" if comparison.drafted is None else "DDTree"
        return message_html(f"Running {run} …")
    plain, drafted = comparison.plain, comparison.drafted
    mood = {IDENTICAL: "good", DIFFERENT: "bad"}.get(verdict.kind, "neutral")
    speed = ""
    if drafted.rounds and verdict.kind != "stopped":
        ratio = drafted.tokens_per_second / plain.tokens_per_second
        speed = f'<b class="speed">{ratio:.2f}×</b> the speed of plain generation.'
        if ratio < 1:
            speed += " Drafting did not pay here: try another drafter, budget or prompt."
    return (
        f'<div class="verdict {mood}"><b>{escape(verdict.kind.capitalize())}.</b> {escape(verdict.text)} {speed}</div>'
    )


def message_html(text: str, mood: str = "neutral") -> str:
    """A plain message, "bad" for an error."""
    return f'<div class="verdict {mood}">{escape(text)}</div>'


def telling_round(rounds: list[DraftedRound]) -> int:
    """The number, from 1, of the round that kept most tokens among those that also rejected some, if any did."""
    best = max(range(len(rounds)), key=lambda i: (len(rounds[i].tree) > len(rounds[i].path), len(rounds[i].path)))
    return best + 1


def round_html(rounds: list[DraftedRound], number: int, prefix: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The tree of round `number`, counted from 1, with what led to it.

    Args:
        prefix: the new tokens of the whole run.
    """
    entry = rounds[number - 1]
    root = sum(len(earlier.path) for earlier in rounds[: number - 1])  # its place among the new tokens
    context = tokenizer.decode(prefix[max(0, root + 1 - CONTEXT_TOKENS) : root + 1])
    drafted, accepted = len(entry.tree) - 1, len(entry.path) - 1
    end = "the text ends here" if entry.bonus is None else "and one more token that the model chose itself"
    sentence = f"{drafted} nodes drafted, {accepted} accepted, {end}."
    if drafted > MOST_NODES:
        sentence += " Drawn are the accepted path and the nodes drafted first; +n counts those left out."
    return (
        f'<div class="round"><p>Round {number} of {len(rounds)}: {sentence}</p>'
        f'<p class="context" dir="auto">… {escape(context)}</p>'
        f'<div class="tree">{tree_svg(entry.tree, entry.path, tokenizer, entry.bonus)}</div></div>'
    )


_KINDS = {
    "root": "the last token of the text so far",
    "accepted": "drafted, and what the model chose",
    "rejected": "drafted in vain",
    "bonus": "the model's own choice where it left the tree",
}
_CHIPS = (f'<span><span class="chip {kind}">{kind}</span> {meaning}</span>' for kind, meaning in _KINDS.items())
LEGEND = (
    f'<p class="legend">{"".join(_CHIPS)}<span>A percentage is the drafter\'s estimate that the text gets to this node.'
    "</span></p>"
)

STYLE = """
.buttons button { white-space: nowrap; padding-inline: 8px; }
.conversation { display: flex; flex-direction: column; gap: 8px; max-height: 320px; overflow-y: auto; }
.turn { margin: 0; padding: 8px 12px; border-radius: 12px; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 85%; }
.turn.user { align-self: flex-end; background: #d1fae5; color: #064e3b; }
.turn.assistant { align-self: flex-start; background: #f3f4f6; color: #1f2937; }
.stats { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 4px 2px; }
.stats dt { font-size: 12px; opacity: .7; }
.stats dd { margin: 0; font-size: 18px; font-weight: 600; font-variant-numeric: tabular-nums; }
.verdict { padding: 10px 14px; border-radius: 8px; border: 1px solid #d1d5db; background: #f9fafb; color: #1f2937; }
.verdict.good { border-color: #059669; background: #ecfdf5; color: #064e3b; }
.verdict.bad { border-color: #dc2626; background: #fef2f2; color: #7f1d1d; }
.verdict .speed { font-size: 18px; }
.round p { margin: 4px 0; overflow-wrap: anywhere; }
.context { white-space: pre-wrap; font-family: monospace; font-size: 13px; opacity: .8; }
.tree { overflow: auto; max-height: 560px; border: 1px solid #e5e7eb; border-radius: 8px; background: #fff; }
.tree svg { display: block; max-width: none; }
.legend { display: flex; flex-wrap: wrap; gap: 8px 18px; font-size: 13px; }
.chip { padding: 2px 8px; border-radius: 5px; border: 1px solid; white-space: nowrap; }
.chip.root { background: #1f2937; color: #fff; }
.chip.accepted { background: #d1fae5; border-color: #059669; color: #064e3b; }
.chip.rejected { background: #f9fafb; border-color: #d1d5db; color: #6b7280; }
.chip.bonus { background: #fef3c7; border-color: #d97706; color: #78350f; }
"""
