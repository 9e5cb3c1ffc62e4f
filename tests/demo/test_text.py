"""Untrusted text on the page."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ddtree.demo.text import escape, shorten, visible, width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the\n", "␣the⏎"),
        ("\x1b[0m\x07", "\\x1b[0m\\x07"),
        ("a\u202eb", "a\\u202eb"),
        ("\U000e0041", "\\U000e0041"),
        ("\u0301", "◌\u0301"),
        ("שלום🙂", "שלום🙂"),
    ],
)
def test_visible_shows_invisible_characters(text, shown):
    assert visible(text) == shown


@given(st.text())
def test_visible_returns_printable_text(text):
    assert visible(text).isprintable()


@given(st.text(), st.integers(1, 12))
def test_shorten_keeps_to_the_columns(text, columns):
    short = shorten(visible(text), columns)
    assert width(short) <= columns
    assert short == visible(text) or short.endswith("…")


def test_width_counts_wide_and_combining_characters():
    assert [width(text) for text in ("ab", "漢字", "e\u0301")] == [2, 4, 1]


def test_escape_keeps_what_the_reader_sees():
    assert "".join(ElementTree.fromstring(f"<p>{escape('a${b}`<&')}</p>").itertext()) == "a${b}`<&"
