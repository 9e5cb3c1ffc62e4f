"""The colours of the draft tree and the style sheet of the page."""

from typing import NamedTuple


class Colours(NamedTuple):
    """The colours of a node's box, as CSS."""

    fill: str
    border: str
    text: str


COLOURS = {
    "root": Colours("#1f2937", "#1f2937", "#ffffff"),
    "accepted": Colours("#d1fae5", "#059669", "#064e3b"),
    "rejected": Colours("#f9fafb", "#d1d5db", "#6b7280"),
    "bonus": Colours("#fef3c7", "#d97706", "#78350f"),
}


def _chip_rule(kind: str, colours: Colours) -> str:
    return f".chip.{kind} {{ background: {colours.fill}; border-color: {colours.border}; color: {colours.text}; }}"


_LAYOUT = """
.buttons button { white-space: nowrap; padding-inline: 8px; }
.conversation { display: flex; flex-direction: column; gap: 8px; max-height: 320px; overflow-y: auto; }
.turn { margin: 0; padding: 8px 12px; border-radius: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
.turn { max-width: 85%; }
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
"""
STYLE_SHEET = _LAYOUT + "\n".join(_chip_rule(kind, colours) for kind, colours in COLOURS.items()) + "\n"
