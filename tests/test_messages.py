"""No error message holds a double quote, because clients put messages into JSON."""

import ast

import pytest
from helpers import ROOT

from hf_ddtree.messages import quoted

SOURCES = sorted([*(ROOT / "hf_ddtree").rglob("*.py"), *(ROOT / "kernels").glob("*.py")])
# These files write other languages, in which double quotes are needed.
OTHER_LANGUAGES = {"hf_ddtree/demo/present.py", "hf_ddtree/demo/tree_svg.py", "hf_ddtree/training/card.py"}
REPLACES_THEM = "hf_ddtree/messages.py"


def strings(tree: ast.AST) -> list[ast.Constant]:
    """Return the strings of a syntax tree that are neither docstrings nor other bare expressions."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare]
    return [node for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize(
    "value, expected",
    [
        (8, "8"),
        (None, "None"),
        ("8", "'8'"),
        ("it's", "'it's'"),
        ('say "x"', "'say 'x''"),
        ({"a": "it's"}, "{'a': 'it's'}"),
    ],
)
def test_quoted_has_no_double_quotes(value, expected):
    assert quoted(value) == expected


def test_messages_have_no_double_quotes():
    """The texts of many messages stand outside the `raise`, so every string of a file is looked at."""
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if name not in {*OTHER_LANGUAGES, REPLACES_THEM}:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{name}:{node.lineno} {node.value!r}" for node in strings(tree) if '"' in node.value]
    assert not found, "\n".join(found)


def test_messages_show_values_without_repr():
    """`repr` puts a string with an apostrophe into double quotes, so messages use `quoted` instead of `!r`."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                values = [part for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
                found += [f"{path.relative_to(ROOT)}:{part.lineno}" for part in values if part.conversion == ord("r")]
    assert not found, "\n".join(found)
