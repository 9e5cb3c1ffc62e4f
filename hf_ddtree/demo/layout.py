"""Which nodes of a draft tree are drawn, and in which column and row."""

import math
from dataclasses import dataclass

from ..tree import DraftTree

MAX_DRAWN_NODES = 64  # of larger trees, only the accepted path and the nodes that were drafted first are drawn


@dataclass(frozen=True)
class DrawnNode:
    """One box of the picture.

    Args:
        parent: the index of the parent in the list of drawn nodes, or None for the root.
        kind: "root", "accepted", "rejected" or "bonus".
        token_id: the node's token.
        probability: the drafter's estimate that the text reaches the node. None if there is no estimate.
        hidden: how many nodes below this one are not drawn.
    """

    parent: int | None
    kind: str
    token_id: int
    probability: float | None = None
    hidden: int = 0


def drawn_nodes(tree: DraftTree, path: list[int], bonus: int | None) -> list[DrawnNode]:
    """Return the nodes to draw, each parent before its children.

    Args:
        tree: the draft tree.
        path: the accepted nodes, the root first.
        bonus: the bonus token, which becomes a node below the end of the path, or None.
    """
    drawn = _select(len(tree), path)
    position = {node: i for i, node in enumerate(drawn)}
    token_ids, parents, accepted = tree.token_ids.tolist(), tree.parents.tolist(), set(path)
    log_reach = None if tree.log_reach is None else tree.log_reach.tolist()
    hidden = _count_hidden(parents, position)
    nodes = []
    for node in drawn:
        parent = position[parents[node]] if node else None
        kind = "root" if node == 0 else "accepted" if node in accepted else "rejected"
        probability = None if log_reach is None else math.exp(log_reach[node])
        nodes.append(DrawnNode(parent, kind, token_ids[node], probability, hidden[node]))
    if bonus is not None:
        nodes.append(DrawnNode(position[path[-1]], "bonus", bonus))
    return nodes


def _select(size: int, path: list[int]) -> list[int]:
    """Return the root, the path and the first nodes, ascending, at most `MAX_DRAWN_NODES` unless the path is longer.

    No parent is left out, because a parent precedes its children.
    """
    drawn = set(path)
    for node in range(size):
        if len(drawn) > MAX_DRAWN_NODES:
            break
        drawn.add(node)
    return sorted(drawn)


def _count_hidden(parents: list[int], position: dict[int, int]) -> list[int]:
    """Return for each node of the tree how many nodes below it are not drawn, with all their descendants."""
    hidden = [0] * len(parents)
    for node in reversed(range(len(parents))):
        if node not in position:
            hidden[parents[node]] += 1 + hidden[node]
    return hidden


def columns_and_rows(nodes: list[DrawnNode]) -> list[tuple[int, int]]:
    """Return the column and the row of each node. No two nodes share a place.

    The column is the depth. The first child is in its parent's row. Each further child is below the subtrees of its
    earlier siblings.
    """
    children: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(i)
    heights = [1] * len(nodes)
    for i in reversed(range(len(nodes))):
        heights[i] = max(1, sum(heights[child] for child in children[i]))
    places = [(0, 0)] * len(nodes)
    for i in range(len(nodes)):
        column, row = places[i]
        for child in children[i]:
            places[child] = (column + 1, row)
            row += heights[child]
    return places
