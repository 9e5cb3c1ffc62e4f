"""Which nodes are drawn, and where."""

import math

import pytest

from hf_ddtree import DraftTree
from hf_ddtree.demo.layout import MAX_DRAWN_NODES, columns_and_rows, drawn_nodes


def wide_tree():
    """A tree of 300 drafted nodes in which every node has three children, and a path through it."""
    n_nodes = 300
    tree = DraftTree.from_lists([65] * (n_nodes + 1), [-1] + [node // 3 for node in range(n_nodes)])
    return tree, [0, 1, 3 * 1 + 1, 3 * 4 + 1, 3 * 13 + 1, 3 * 40 + 1]


def test_drawn_nodes_tells_the_kinds_apart():
    tree = DraftTree.from_lists([65, 66, 67, 68, 69], [-1, 0, 0, 2, 2])
    nodes = drawn_nodes(tree, [0, 2, 3], bonus=70)
    assert [node.kind for node in nodes] == ["root", "rejected", "accepted", "accepted", "rejected", "bonus"]
    assert [node.token_id for node in nodes] == [65, 66, 67, 68, 69, 70]
    assert [node.parent for node in nodes] == [None, 0, 0, 2, 2, 3]


def test_drawn_nodes_counts_the_hidden_nodes():
    tree, path = wide_tree()
    nodes = drawn_nodes(tree, path, bonus=None)
    assert 50 < len(nodes) <= MAX_DRAWN_NODES + 1
    assert sum(node.kind == "accepted" for node in nodes) == len(path) - 1
    assert len(nodes) + sum(node.hidden for node in nodes) == len(tree)


def test_drawn_nodes_draws_a_long_path_completely():
    tree = DraftTree.from_lists([65] * 101, list(range(-1, 100)))
    assert len(drawn_nodes(tree, list(range(101)), bonus=None)) == 101


@pytest.mark.parametrize("log_reach", [None, [0.0, math.log(0.5)]])
def test_drawn_nodes_gives_the_estimate_where_there_is_one(log_reach):
    nodes = drawn_nodes(DraftTree.from_lists([65, 66], [-1, 0], log_reach=log_reach), [0], bonus=None)
    expected = [None, None] if log_reach is None else pytest.approx([1, 0.5])
    assert [node.probability for node in nodes] == expected


def test_columns_and_rows_gives_each_node_its_own_place():
    tree = DraftTree.from_lists(list(range(65, 75)), [-1, 0, 0, 1, 1, 2, 2, 2, 4, 7])
    places = columns_and_rows(drawn_nodes(tree, [0, 1], bonus=80))
    assert len(places) == len(set(places)) == 11
    assert [column for column, _ in places] == [*tree.depths.tolist(), 2]


def test_columns_and_rows_keeps_the_first_child_in_its_parents_row():
    tree = DraftTree.from_lists([65, 66, 67, 68, 69], [-1, 0, 0, 1, 1])
    assert columns_and_rows(drawn_nodes(tree, [0], bonus=None)) == [(0, 0), (1, 0), (1, 2), (2, 0), (2, 1)]
