"""Write docs/api.md from the docstrings: python docs/api.py"""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

PAGE = Path(__file__).with_name("api.md")
TITLES = {"Args:": "Arguments", "Attributes:": "Attributes", "Returns:": "Returns", "Raises:": "Raises"}
WITH_ITEMS = ("Args:", "Attributes:", "Raises:")

INTRODUCTION = """# API

What this package adds to transformers. Shapes are in brackets: B is the batch, S the length of the sequence, N the nodes
of a tree, H the target's hidden size and V the size of its vocabulary.

<!-- Written by `python docs/api.py` from the docstrings. -->
"""

OPTIONS = """Arguments of an enabled model's `generate`, or attributes of its `generation_config`. Without
`tree_budget` `generate` is plain. Everything else it takes keeps its meaning, or raises a `ValueError` that names it:
[what is supported](../README.md#what-is-supported). `assistant_model` is the drafter: what `load_drafter` returns, any
causal LM with the target's vocabulary, [one of your own](#a-drafter-of-your-own), or None for prompt look-up."""

OUTPUT = """With `return_dict_in_generate=True`, otherwise the sequences alone. `tree_trace=True` adds each round's tree
and path, `tree_timing=True` its seconds:

```python
options = {"return_dict_in_generate": True, "tree_trace": True, "tree_timing": True}
output = model.generate(**inputs, assistant_model=drafter, tree_budget=16, max_new_tokens=64, **options)
print(output.tokens_per_round)
for entry in output.rounds:
    kept = entry.tree.token_ids[entry.path[1:]]  # the path starts with the root, which was there before
    print(entry.tree_size, entry.accepted_length, repr(tokenizer.decode(kept)), entry.seconds["verify"])
```

The prefill emits the first token, and every round `accepted_length + 1` more: the kept ones and the bonus token."""

OWN_DRAFTER = """Derive from this class and pass a fresh object as `assistant_model`. `get_candidates` is all it needs:

```python
from hf_ddtree.drafters import TreeCandidateGenerator

class RepeatLastToken(TreeCandidateGenerator):
    def get_candidates(self, input_ids, tree_budget, max_depth):
        n_nodes = 1 + min(tree_budget, max_depth)
        return hf_ddtree.DraftTree.from_lists([int(input_ids[0, -1])] * n_nodes, list(range(-1, n_nodes - 1)))

output = model.generate(**inputs, assistant_model=RepeatLastToken(), tree_budget=4, max_new_tokens=64)
```

One that reads the target's states sets `tapped_states` and takes them in `prefill` and `commit_path`."""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: its heading.
        names: dotted names of what it describes.
        introduction: what stands before that.
        with_members: describe the methods and properties of classes too.
    """

    title: str
    names: tuple[str, ...]
    introduction: str = ""
    with_members: bool = True


SECTIONS = (
    Section("Switching it on", ("hf_ddtree.enable", "hf_ddtree.disable")),
    Section("The options of `generate`", ("hf_ddtree.config.TreeConfig",), OPTIONS, with_members=False),
    Section("What `generate` returns", ("hf_ddtree.GenerateDDTreeOutput", "hf_ddtree.Round"), OUTPUT),
    Section(
        "Loading drafters",
        (
            "hf_ddtree.load_drafter",
            "hf_ddtree.embedded.load_embedded",
            "hf_ddtree.DFlashConfig",
            "hf_ddtree.DFlashDraftModel",
        ),
    ),
    Section("Trees", ("hf_ddtree.DraftTree", "hf_ddtree.build_tree")),
    Section("A drafter of your own", ("hf_ddtree.drafters.TreeCandidateGenerator",), OWN_DRAFTER),
)


@dataclass(frozen=True)
class Entry:
    """A function, class, method or property, as its source has it.

    Args:
        name: its heading.
        signature: its header; of a class followed by that of `__init__` or by its fields.
        parameters: the names of its parameters or fields, self and cls excluded.
        docstring: without indentation.
    """

    name: str
    signature: str
    parameters: tuple[str, ...]
    docstring: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *map(render_section, SECTIONS)])


def render_section(section: Section) -> str:
    """A heading, the introduction and the entries."""
    introduction = [f"{section.introduction}\n"] if section.introduction else []
    return "\n".join([f"## {section.title}\n", *introduction, *map(render_entry, section_entries(section))])


def render_entry(entry: Entry) -> str:
    """A heading, the signature and the docstring."""
    level = "###" if entry.name.startswith("hf_ddtree.") else "####"
    return f"{level} `{entry.name}`\n\n```python\n{entry.signature}\n```\n\n{render_docstring(entry.docstring)}\n"


def render_docstring(docstring: str) -> str:
    """Markdown for a docstring in Google's style."""
    parts = []
    for title, text in split_sections(docstring):
        parts += [f"**{TITLES[title]}**"] if title else []
        parts += [render_items(text) if title in WITH_ITEMS else text]
    return "\n\n".join(parts)


def render_items(text: str) -> str:
    """A list of names and meanings."""
    return "\n".join(f"- `{'`, `'.join(names)}`: {meaning}" for names, meaning in split_items(text))


def split_sections(docstring: str) -> list[tuple[str, str]]:
    """The parts of a docstring, each with its title or ""; what stands indented under a title is dedented."""
    sections = [("", [])]
    for line in docstring.splitlines():
        if line in TITLES:
            sections.append((line, []))
            continue
        if sections[-1][0] and line and not line.startswith(" "):
            sections.append(("", []))
        sections[-1][1].append(line)
    return [(title, textwrap.dedent("\n".join(lines)).strip()) for title, lines in sections]


def split_items(text: str) -> list[tuple[list[str], str]]:
    """Names and meaning of every `name: meaning` or `a, b: meaning`, whose further lines are indented."""
    items = []
    for line in text.splitlines():
        if line.startswith("    "):
            items[-1] += "\n" + line.removeprefix("  ")  # a list in Markdown is indented by two
        else:
            items.append(line)
    pairs = [item.split(": ", maxsplit=1) for item in items]
    return [(names.split(", "), meaning) for names, meaning in pairs]


def described(docstring: str) -> list[str]:
    """The parameters, fields and attributes that a docstring describes."""
    lists = [split_items(text) for title, text in split_sections(docstring) if title in ("Args:", "Attributes:")]
    return [name for items in lists for names, _ in items for name in names]


def section_entries(section: Section) -> list[Entry]:
    """Every entry of a section, a class followed by its members."""
    return [entry for name in section.names for entry in entries(name, section.with_members)]


def entries(name: str, with_members: bool) -> list[Entry]:
    """The entry of a function or class, and those of the public methods and properties the class itself defines."""
    source = inspect.getsource(resolve_name(name))
    node = ast.parse(source).body[0]
    if isinstance(node, ast.FunctionDef):
        return [function_entry(name, node, source)]
    methods = [member for member in node.body if isinstance(member, ast.FunctionDef) and with_members]
    public = [method for method in methods if not method.name.startswith("_")]
    members = [function_entry(f"{node.name}.{method.name}", method, source) for method in public]
    return [class_entry(name, node, source), *members]


def function_entry(name: str, node: ast.FunctionDef, source: str) -> Entry:
    """The entry of a function, method or property."""
    arguments = [node.args.vararg, node.args.kwarg]
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, arguments)]
    parameters = tuple(argument.arg for argument in arguments if argument.arg not in ("self", "cls"))
    return Entry(name, header(node, source).removesuffix(":"), parameters, ast.get_docstring(node))


def class_entry(name: str, node: ast.ClassDef, source: str) -> Entry:
    """The entry of a class, with what it is made from."""
    constructors = [member for member in node.body if getattr(member, "name", None) == "__init__"]
    if constructors:
        constructor = function_entry(name, constructors[0], source)
        made_from, parameters = constructor.signature, constructor.parameters
    else:
        fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
        made_from = "\n".join(ast.get_source_segment(source, member) for member in fields)
        parameters = tuple(member.target.id for member in fields)
    signature = f"{header(node, source)}\n{textwrap.indent(made_from, '    ')}"
    return Entry(name, signature, parameters, ast.get_docstring(node))


def header(node: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    """The lines before the docstring, as written: what `inspect` prints depends on Python's version."""
    first = min(part.lineno for part in [node, *node.decorator_list])
    return textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.body[0].lineno - 1]))


if __name__ == "__main__":
    main()
