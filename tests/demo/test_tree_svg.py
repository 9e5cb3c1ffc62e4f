"""Pictures of draft trees, also of tokens with hostile text."""

import math
from xml.etree import ElementTree

import pytest
from demo.support import HOSTILE, Letters
from hypothesis import given
from hypothesis import strategies as st

from hf_ddtree import DraftTree
from hf_ddtree.demo import tree_svg

SVG = "{http://www.w3.org/2000/svg}"


def picture(tree, path, tokenizer=None, bonus=None):
    """Return the parsed picture."""
    return ElementTree.fromstring(tree_svg(tree, path, tokenizer or Letters(), bonus))


def nodes_of(svg, kind):
    """Return the groups of the nodes of one kind."""
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == f"node {kind}"]


@st.composite
def hostile_rounds(draw):
    """A random tree, a path in it, and a tokenizer whose texts try to break out of the picture."""
    n_nodes = draw(st.integers(0, 12))
    parents = [-1] + [draw(st.integers(0, node)) for node in range(n_nodes)]
    tree = DraftTree.from_lists(list(range(n_nodes + 1)), parents)
    pieces = st.text(max_size=6) | st.sampled_from([HOSTILE, "]]>", "<!--", "\x1b[2J", "&#x3c;", "<svg/onload=x>", ""])
    texts = {token: draw(pieces) for token in range(len(tree) + 1)}
    path = [0]
    while (children := (tree.parents == path[-1]).nonzero().flatten().tolist()) and draw(st.booleans()):
        path.append(draw(st.sampled_from(children)))
    return tree, path, Letters(texts)


@given(hostile_rounds(), st.booleans())
def test_tree_svg_shows_hostile_tokens_as_text(a_round, with_bonus):
    tree, path, tokenizer = a_round
    svg = tree_svg(tree, path, tokenizer, len(tree) if with_bonus else None)
    root = ElementTree.fromstring(svg)
    elements = [element.tag.removeprefix(SVG) for element in root.iter()]
    assert set(elements) <= {"svg", "g", "title", "rect", "text", "path"}
    n_boxes = len(tree) + with_bonus
    assert elements.count("g") == elements.count("title") == elements.count("text") == n_boxes
    assert elements.count("path") == n_boxes - 1
    names = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in names if name.startswith("on") or "href" in name]
    assert all(character.isprintable() for character in svg)
    assert not set("${}`") & set(svg)


def test_tree_svg_marks_the_accepted_path():
    tree = DraftTree.from_lists([65, 66, 67, 68, 69], [-1, 0, 0, 2, 2])
    svg = picture(tree, [0, 2, 3], bonus=70)
    labels = {
        kind: ["".join(g.itertext()) for g in nodes_of(svg, kind)] for kind in ("root", "accepted", "rejected", "bonus")
    }
    assert [len(texts) for texts in labels.values()] == [1, 2, 2, 1]
    assert all(letter in text for letter, text in zip("CD", labels["accepted"], strict=True))
    assert all(letter in text for letter, text in zip("BE", labels["rejected"], strict=True))
    assert "F" in labels["bonus"][0]


def test_tree_svg_draws_the_bonus_token_dashed():
    svg = picture(DraftTree.from_lists([65, 66], [-1, 0]), [0], bonus=67)
    (bonus,) = nodes_of(svg, "bonus")
    assert bonus.find(f"{SVG}rect").get("stroke-dasharray")
    assert [bool(edge.get("stroke-dasharray")) for edge in svg.iter(f"{SVG}path")] == [False, True]


def test_tree_svg_draws_boxes_side_by_side():
    tree = DraftTree.from_lists(list(range(65, 75)), [-1, 0, 0, 1, 1, 2, 2, 2, 4, 7])
    rectangles = [r for r in picture(tree, [0, 1], bonus=80).iter(f"{SVG}rect") if r.get("x")]
    boxes = [tuple(float(r.get(name)) for name in ("x", "y", "width", "height")) for r in rectangles]
    assert len(boxes) == 11
    for i, (x, y, width, height) in enumerate(boxes):
        assert all(x + width <= u or u + width <= x or y + height <= v or v + height <= y for u, v, *_ in boxes[:i])


@pytest.mark.parametrize("with_probabilities", [True, False])
def test_tree_svg_shows_the_estimate_where_there_is_one(with_probabilities):
    log_reach = [0.0, math.log(0.62), math.log(0.004)] if with_probabilities else None
    tree = DraftTree.from_lists([65, 66, 67], [-1, 0, 1], log_reach=log_reach)
    text = "".join(picture(tree, [0]).itertext())
    assert ("62%" in text and "<1%" in text) == with_probabilities
    assert "100%" not in text


def test_tree_svg_counts_the_nodes_that_are_not_drawn():
    n_nodes = 300
    tree = DraftTree.from_lists([65] * (n_nodes + 1), [-1] + [node // 3 for node in range(n_nodes)])
    svg = picture(tree, [0, 1])
    left_out = [int(text.text) for text in svg.iter(f"{SVG}text") if text.text.startswith("+")]
    assert left_out and len(list(svg.iter(f"{SVG}g"))) + sum(left_out) == len(tree)


def test_tree_svg_draws_a_root_without_drafted_nodes():
    assert len(nodes_of(picture(DraftTree.from_lists([65], [-1]), [0], bonus=66), "bonus")) == 1
