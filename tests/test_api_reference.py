"""The API page is what the docstrings say now, and these describe every parameter."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers import char_tokenizer, random_ids

import hf_ddtree
from hf_ddtree.config import LARGEST_BUDGET, TREE_OPTIONS, TreeConfig
from hf_ddtree.drafters import TreeCandidateGenerator
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

api = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "api.py"))
ENTRIES = {entry.name: entry for section in api["SECTIONS"] for entry in api["section_entries"](section)}


def test_the_page_is_what_the_docstrings_say():
    committed = api["PAGE"].read_text(encoding="utf-8")
    assert committed == api["render"](), "docs/api.md is out of date; run: python docs/api.py"


def test_the_page_has_everything_public():
    public = {f"hf_ddtree.{name}" for name in hf_ddtree.__all__}
    assert public <= set(ENTRIES)
    assert set(ENTRIES["hf_ddtree.config.TreeConfig"].parameters) == set(TREE_OPTIONS)
    methods = {name for name, member in vars(TreeCandidateGenerator).items() if inspect.isfunction(member)}
    assert {f"TreeCandidateGenerator.{name}" for name in methods} <= set(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_docstring_describes_every_parameter_and_no_other(name):
    assert sorted(api["described"](ENTRIES[name].docstring)) == sorted(ENTRIES[name].parameters)


def test_the_signatures_are_those_of_the_objects():
    """They are read from the source; what is called must take the same."""
    for name in ("enable", "load_drafter", "build_tree", "Round", "DraftTree", "DFlashDraftModel"):
        assert list(inspect.signature(getattr(hf_ddtree, name)).parameters) == list(
            ENTRIES[f"hf_ddtree.{name}"].parameters
        )


def test_the_largest_budget_is_the_one_enforced():
    assert f"from 1 to {LARGEST_BUDGET:,}," in TreeConfig.__doc__


DOCSTRING = """Add `b` to a.

More about it:
it is addition.

Args:
    a, b: `[N]` int64,
        also on a GPU:
        - as a list
    kwargs: passed on: all of them.

Returns:
    The sum,
    or `NaN`.

Raises:
    ValueError: if a: b.

Source: nobody (1999).
"""

MARKDOWN = """Add `b` to a.

More about it:
it is addition.

**Arguments**

- `a`, `b`: `[N]` int64,
  also on a GPU:
  - as a list
- `kwargs`: passed on: all of them.

**Returns**

The sum,
or `NaN`.

**Raises**

- `ValueError`: if a: b.

Source: nobody (1999)."""


def test_docstrings_become_markdown():
    assert api["render_docstring"](DOCSTRING) == MARKDOWN
    assert api["described"](DOCSTRING) == ["a", "b", "kwargs"]


def test_the_examples_run(tmp_path, capsys):
    model = hf_ddtree.enable(tiny_model("llama"))
    inputs = {"input_ids": random_ids(6)}
    names = {"hf_ddtree": hf_ddtree, "model": model, "inputs": inputs, "tokenizer": char_tokenizer()}
    plain = model.generate(**inputs, max_new_tokens=64)
    for name in ("OUTPUT", "OWN_DRAFTER"):
        code = re.search(r"```python\n(.*?)```", api[name], re.DOTALL)[1]
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    names |= {"drafter": tiny_dflash_drafter(model)}
    output = runpy.run_path(str(tmp_path / "OUTPUT.py"), names)["output"]
    assert torch.equal(output.sequences, plain)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(output.rounds)
    assert torch.equal(runpy.run_path(str(tmp_path / "OWN_DRAFTER.py"), names)["output"], plain)
