"""The picture of a draft tree, as SVG."""

from transformers import PreTrainedTokenizerBase

from ..tree import DraftTree
from .layout import DrawnNode, columns_and_rows, drawn_nodes
from .style import COLOURS
from .text import escape, shorten, visible

# pixels
NODE_WIDTH, NODE_HEIGHT = 118, 24
COLUMN_WIDTH, ROW_HEIGHT = 146, 30
MARGIN = 10
COUNT_WIDTH = 40  # for the number of hidden nodes beside the last column
# monospaced characters of a token beside a percentage, and without one
TOKEN_COLUMNS, TOKEN_COLUMNS_ALONE = 9, 14

FONT = 'font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="12"'
DASHED = ' stroke-dasharray="4 3"'

Place = tuple[int, int]  # x and y of a box's upper left corner


def tree_svg(tree: DraftTree, path: list[int], tokenizer: PreTrainedTokenizerBase, bonus: int | None = None) -> str:
    """Draw one round: depth grows from left to right, the accepted path is coloured, rejected nodes are grey.

    Each node shows its token. If the tree has estimates, it also shows the drafter's estimate that the text reaches the
    node. Tokens are escaped, and their invisible characters are written out.

    Args:
        tree: the draft tree.
        path: the accepted nodes, the root first.
        tokenizer: decodes each token alone.
        bonus: the token that the target chose where it left the tree, drawn as a dashed node. None draws no such node.

    Returns:
        An SVG element.
    """
    nodes = drawn_nodes(tree, path, bonus)
    places = [(MARGIN + column * COLUMN_WIDTH, MARGIN + row * ROW_HEIGHT) for column, row in columns_and_rows(nodes)]
    width = max(x for x, _ in places) + NODE_WIDTH + COUNT_WIDTH + MARGIN
    height = max(y for _, y in places) + ROW_HEIGHT + MARGIN
    # grey nodes first, so that the accepted path lies on top
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].kind != "rejected")
    edges = "".join(
        _edge(nodes[i].kind, places[parent], places[i]) for i in order if (parent := nodes[i].parent) is not None
    )
    boxes = "".join(_box(nodes[i], places[i], tokenizer) for i in order)
    label = f"Draft tree of {len(tree) - 1} nodes, {len(path) - 1} accepted"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}" {FONT}>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{edges}{boxes}</svg>'
    )


def _edge(kind: str, start: Place, end: Place) -> str:
    """Draw the curve from a parent's box to the box of a node of `kind`."""
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT / 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT / 2
    middle = (x1 + x2) / 2
    width = 1 if kind == "rejected" else 2.5
    curve = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"
    dash = DASHED if kind == "bonus" else ""
    return f'<path d="{curve}" fill="none" stroke="{COLOURS[kind].border}" stroke-width="{width}"{dash}/>'


def _box(node: DrawnNode, place: Place, tokenizer: PreTrainedTokenizerBase) -> str:
    """Draw a node: its token, its percentage, the number of hidden nodes below it, and all of it again as a tooltip."""
    x, y = place
    colours = COLOURS[node.kind]
    token = visible(tokenizer.decode([node.token_id])) or f"id {node.token_id}"
    chance = "" if node.probability is None or node.kind == "root" else _percent(node.probability)
    title = f"{token} (token {node.token_id}), {node.kind}" + (f", estimated at {chance}" if chance else "")
    dash = DASHED if node.kind == "bonus" else ""
    size = f'width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="5"'
    baseline = y + NODE_HEIGHT / 2 + 4
    label = escape(shorten(token, TOKEN_COLUMNS if chance else TOKEN_COLUMNS_ALONE))
    parts = [
        f'<g class="node {node.kind}"><title>{escape(title)}</title>',
        f'<rect x="{x}" y="{y}" {size} fill="{colours.fill}" stroke="{colours.border}"{dash}/>',
        f'<text x="{x + 7}" y="{baseline}" fill="{colours.text}" direction="ltr" unicode-bidi="isolate">{label}</text>',
    ]
    if chance:
        style = f'fill="{colours.text}" font-size="10" text-anchor="end"'
        parts.append(f'<text x="{x + NODE_WIDTH - 6}" y="{baseline}" {style}>{escape(chance)}</text>')
    if node.hidden:
        style = f'fill="{COLOURS["rejected"].text}" font-size="10"'
        parts.append(f'<text x="{x + NODE_WIDTH + 3}" y="{baseline - 7}" {style}>+{node.hidden}</text>')
    return "".join(parts) + "</g>"


def _percent(probability: float) -> str:
    return "<1%" if probability < 0.01 else f"{probability:.0%}"
