"""A draft tree as a picture."""

import math
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..tree import DraftTree
from .text import escape, shorten, visible

MOST_NODES = 64  # of larger trees, the accepted path and the nodes drafted first are drawn
NODE_WIDTH, NODE_HEIGHT = 118, 24
COLUMN, ROW = 146, 30
MARGIN = 10
TOKEN_COLUMNS, TOKEN_COLUMNS_ALONE = 9, 14  # monospaced characters beside a probability, and without one

# fill, border, text
COLOURS = {
    "root": ("#1f2937", "#1f2937", "#ffffff"),
    "accepted": ("#d1fae5", "#059669", "#064e3b"),
    "rejected": ("#f9fafb", "#d1d5db", "#6b7280"),
    "bonus": ("#fef3c7", "#d97706", "#78350f"),
}


@dataclass(frozen=True)
class _Node:
    """A box: `index` in the tree or None for the bonus token, and how many nodes below it are not drawn."""

    index: int | None
    parent: int | None
    kind: str
    token_id: int
    probability: float | None
    hidden: int = 0


def tree_svg(tree: DraftTree, path: list[int], tokenizer: PreTrainedTokenizerBase, bonus: int | None = None) -> str:
    """Draw a round: depth from left to right, the accepted path in colour and the rest grey.

    Each node shows its token and the drafter's estimate that the text gets there, if the tree has one. Tokens are shown
    with their invisible characters made visible, and escaped.

    Args:
        path: the accepted nodes, root first.
        bonus: the token the target chose where it left the tree.
    """
    nodes = _nodes(tree, path, bonus)
    depths, rows = _places(nodes)
    width = 2 * MARGIN + max(depths) * COLUMN + NODE_WIDTH + 40  # 40: for the count of what is not drawn
    height = 2 * MARGIN + (max(rows) + 1) * ROW
    places = [(MARGIN + depth * COLUMN, MARGIN + row * ROW) for depth, row in zip(depths, rows)]
    # grey first, so that the accepted path lies on top
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].kind != "rejected")
    edges = [_edge(nodes[i], places[nodes[i].parent], places[i]) for i in order if nodes[i].parent is not None]
    boxes = [_box(nodes[i], places[i], tokenizer) for i in order]
    label = f"Draft tree of {len(tree) - 1} nodes, {len(path) - 1} accepted"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}" font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(edges)}{"".join(boxes)}</svg>'
    )


def _nodes(tree: DraftTree, path: list[int], bonus: int | None) -> list[_Node]:
    """What is drawn, parents first."""
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    estimates = tree.log_reach
    probabilities = [None] * len(tree) if estimates is None else [math.exp(value) for value in estimates.tolist()]
    drawn = _drawn(len(tree), path)
    position = {index: i for i, index in enumerate(drawn)}
    hidden = [0] * len(tree)
    for index in reversed(range(len(tree))):  # what hangs below a node that is not drawn counts with it
        if index not in position:
            hidden[parents[index]] += 1 + hidden[index]
    accepted = set(path)
    nodes = []
    for index in drawn:
        kind = "root" if index == 0 else "accepted" if index in accepted else "rejected"
        parent = position[parents[index]] if index else None
        nodes.append(_Node(index, parent, kind, token_ids[index], probabilities[index], hidden[index]))
    if bonus is not None:
        nodes.append(_Node(None, position[path[-1]], "bonus", bonus, None))
    return nodes


def _drawn(size: int, path: list[int]) -> list[int]:
    """The indices of at most `MOST_NODES` drafted nodes and the path, without gaps: a parent precedes its children."""
    drawn = set(path)
    for index in range(size):
        if len(drawn) > MOST_NODES:
            break
        drawn.add(index)
    return sorted(drawn)


def _places(nodes: list[_Node]) -> tuple[list[int], list[int]]:
    """Depth and row of each node: first children continue their parent's row, the others start rows below."""
    children: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(i)
    heights = [1] * len(nodes)
    for i in reversed(range(len(nodes))):
        heights[i] = max(1, sum(heights[child] for child in children[i]))
    depths, rows = [0] * len(nodes), [0] * len(nodes)
    for i in range(len(nodes)):
        row = rows[i]
        for child in children[i]:
            depths[child], rows[child] = depths[i] + 1, row
            row += heights[child]
    return depths, rows


def _edge(node: _Node, start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT / 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT / 2
    middle = (x1 + x2) / 2
    width = 1 if node.kind == "rejected" else 2.5
    dash = ' stroke-dasharray="4 3"' if node.kind == "bonus" else ""
    curve = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"
    return f'<path d="{curve}" fill="none" stroke="{COLOURS[node.kind][1]}" stroke-width="{width}"{dash}/>'


def _box(node: _Node, place: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> str:
    x, y = place
    fill, border, colour = COLOURS[node.kind]
    token = visible(tokenizer.decode([node.token_id])) or f"id {node.token_id}"
    chance = None if node.probability is None or node.kind == "root" else _percent(node.probability)
    label = shorten(token, TOKEN_COLUMNS_ALONE if chance is None else TOKEN_COLUMNS)
    title = f"{token} (token {node.token_id}), {node.kind}" + (f", drafted with {chance}" if chance else "")
    dash = ' stroke-dasharray="4 3"' if node.kind == "bonus" else ""
    middle = y + NODE_HEIGHT / 2 + 4
    size = f'width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="5"'
    parts = [
        f'<g class="node {node.kind}"><title>{escape(title)}</title>',
        f'<rect x="{x}" y="{y}" {size} fill="{fill}" stroke="{border}"{dash}/>',
        f'<text x="{x + 7}" y="{middle}" fill="{colour}" direction="ltr" unicode-bidi="isolate">{escape(label)}</text>',
    ]
    if chance is not None:
        right = x + NODE_WIDTH - 6
        parts.append(
            f'<text x="{right}" y="{middle}" fill="{colour}" font-size="10" text-anchor="end">{escape(chance)}</text>'
        )
    if node.hidden:
        right = x + NODE_WIDTH + 3
        parts.append(f'<text x="{right}" y="{middle - 7}" fill="#6b7280" font-size="10">+{node.hidden}</text>')
    return "".join(parts) + "</g>"


def _percent(probability: float) -> str:
    return "<1%" if probability < 0.01 else f"{probability:.0%}"
