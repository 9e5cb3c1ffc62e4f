"""Write docs/api.md from the docstrings: `python docs/write_api.py`. With `--check`, only say whether it is current.

griffe parses the docstrings and griffe2md renders them. This script chooses the order of the page and adapts the result
to GitHub, where an anchor is the text of a heading in lower case and without dots.
"""

import re
import sys
from pathlib import Path

import griffe
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
SECTIONS = {
    "Turning tree decoding on and off": ["enable", "disable"],
    "Options and output of `generate`": ["TreeConfig", "POLICIES", "GenerateDDTreeOutput", "Round"],
    "Loading drafters": ["load_drafter", "load_embedded", "DFlashConfig", "DFlashDraftModel"],
    "Writing a drafter": ["Drafter", "DraftTree", "build_tree", "Randomness"],
}
INTRODUCTION = """\
# API

<!-- `make docs` writes this page from the docstrings. Do not edit it. -->

This page describes every public name of `hf_ddtree`. [output.md](output.md) shows how to read what `generate` returns.
[extending.md](extending.md) shows how to write a drafter.

The options in `TreeConfig` are arguments of an enabled model's `generate`, or attributes of its `generation_config`.
Without `tree_budget`, `generate` is plain. `assistant_model` is the drafter: what `load_drafter` returns, any causal LM
with the target's vocabulary, a `Drafter` of your own, or None for prompt look-up. Every other argument keeps its
meaning, or raises a `ValueError` that names it: see [what is supported](../README.md#what-is-supported).

Brackets hold shapes: B is the batch, S the length of the sequence, P the length of the prompt, N the number of nodes in
a tree, H the hidden size of the target, and V the size of its vocabulary.
"""
SECTIONS_OF_ITEMS = (
    griffe.DocstringSectionKind.parameters,
    griffe.DocstringSectionKind.attributes,
    griffe.DocstringSectionKind.returns,
    griffe.DocstringSectionKind.raises,
)
CONFIG: ConfigDict = {
    "heading_level": 3,
    "members_order": "source",
    "show_if_no_docstring": False,
    "summary": False,
}


def main() -> int:
    """Write the page, or check it; return the exit status."""
    page = render(load())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page:
        print("docs/api.md is not current. Run `make docs`.", file=sys.stderr)
        return 1
    return 0


def load() -> dict[str, griffe.Alias]:
    """Return what the sources say about every public name, with docstrings that are prepared for `render`."""
    package = griffe.load(
        "hf_ddtree",
        search_paths=[ROOT],
        docstring_parser=griffe.Parser.google,
        docstring_options=griffe.GoogleOptions(
            returns_multiple_items=False,
            returns_named_value=False,
            # tests/test_api_page.py compares the parameters. It also knows classes that get `__init__` at run time.
            warn_unknown_params=False,
            warn_missing_types=False,
        ),
        allow_inspection=False,
    )
    public = {str(name): public_member(package, str(name)) for name in package.exports or []}
    for member in public.values():
        for documented in [member, *members(member)]:
            if documented.docstring is not None:
                prepare(documented.docstring)
    return public


def public_member(package: griffe.Object, name: str) -> griffe.Alias:
    """Return what `hf_ddtree.<name>` is at run time. griffe prefers a module of that name, such as enable.py."""
    member = package[name]
    return griffe.Alias(name, member[name], parent=package) if member.is_module else member


def members(member: griffe.Alias) -> list[griffe.Object]:
    """Return the public methods, properties and attributes that a class itself defines."""
    return [part for part in member.final_target.members.values() if not part.name.startswith("_")]


def prepare(docstring: griffe.Docstring) -> None:
    """Change in a docstring what griffe2md would render as broken Markdown."""
    # griffe knows only the plural as the title of a section with code.
    docstring.value = re.sub(r"^Example:$", "Examples:", docstring.value, flags=re.MULTILINE)
    for section in docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.examples:
            section.title = "Example:"
        elif section.kind in SECTIONS_OF_ITEMS:
            for item in section.value:
                # griffe2md makes each item an entry of a list, so further lines must be indented.
                item.description = item.description.replace("\n", "\n  ")


def render(public: dict[str, griffe.Alias]) -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [render_object_docs(public[name], CONFIG) for name in names]
    page = re.sub(r"\[([\w*]+)\]\(#([\w.]*)\)", link, "\n".join(parts))
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"


def link(match: re.Match) -> str:
    """Return the link of a type as GitHub needs it, or the bare name of a type that is not on the page."""
    name, path = match.groups()
    is_public = path.startswith("hf_ddtree.") and any(name in names for names in SECTIONS.values())
    return f"[{name}](#hf_ddtree{name.lower()})" if is_public else name


if __name__ == "__main__":
    sys.exit(main())
