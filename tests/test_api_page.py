"""docs/api.md is current and complete, every public docstring is complete, and the examples run."""

import doctest
import re
import runpy
import sys

import griffe
import pytest
import torch
from helpers import ROOT, char_tokenizer, random_ids

import hf_ddtree
from hf_ddtree.request import MAX_TREE_BUDGET, TREE_OPTIONS, TreeConfig
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

SCRIPT = str(ROOT / "docs" / "write_api.py")
api = runpy.run_path(SCRIPT)
PUBLIC = api["load"]()
# What has a docstring of its own on the page: every public name, and the methods of the public classes.
METHODS = [part for member in PUBLIC.values() for part in api["members"](member) if part.is_function]
DESCRIBED = {str(part.path): part for part in [*PUBLIC.values(), *METHODS]}


def documented(part) -> list[str]:
    """Return the parameters and attributes that a docstring describes."""
    kinds = (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
    sections = [section for section in part.docstring.parsed if section.kind in kinds]
    return sorted(item.name for section in sections for item in section.value)


def expected(part) -> list[str]:
    """Return the parameters of a function or of a class, or the fields of a class without an `__init__` of its own."""
    if part.is_attribute:
        return []
    source = part.final_target if part.is_alias else part
    function = source.members.get("__init__") if source.is_class else source
    if function is not None:
        return sorted(parameter.name for parameter in function.parameters if parameter.name not in ("self", "cls"))
    attributes = [member for member in source.members.values() if member.is_attribute]
    return sorted(
        attribute.name for attribute in attributes if attribute.annotation and "property" not in attribute.labels
    )


def example(docstring: griffe.Docstring) -> list[str]:
    """Return the examples of a docstring, as text with prompts."""
    kind = griffe.DocstringSectionKind.examples
    sections = [section for section in docstring.parsed if section.kind is kind]
    return [text for section in sections for part, text in section.value if part is kind]


def test_api_page_is_current():
    assert api["PAGE"].read_text(encoding="utf-8") == api["render"](PUBLIC), "Run `make docs`."


def test_api_page_has_every_public_name():
    page = api["PAGE"].read_text(encoding="utf-8")
    assert [name for name in hf_ddtree.__all__ if f"\n### `hf_ddtree.{name}`\n" not in page] == []
    assert sorted(name for names in api["SECTIONS"].values() for name in names) == sorted(hf_ddtree.__all__)


@pytest.mark.parametrize("changed", [False, True], ids=["current", "changed"])
def test_main_checks_the_page(changed, tmp_path, monkeypatch, capsys):
    page = tmp_path / "api.md"
    page.write_text(api["render"](PUBLIC) + "changed\n" * changed, encoding="utf-8")
    monkeypatch.setitem(api["main"].__globals__, "PAGE", page)
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--check"])
    assert api["main"]() == changed
    assert ("make docs" in capsys.readouterr().err) == changed


@pytest.mark.parametrize("path", DESCRIBED)
def test_docstring_describes_every_parameter(path):
    part = DESCRIBED[path]
    assert part.docstring is not None, "no docstring"
    assert documented(part) == expected(part)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_an_example(name):
    docstring = PUBLIC[name].docstring
    assert docstring is not None, "no docstring"
    assert example(docstring) != [], "no section `Example:` with lines that start with `>>>`"


@pytest.fixture
def names(monkeypatch):
    """The variables that examples use. A small random drafter stands for every checkpoint."""
    model = hf_ddtree.enable(tiny_model("llama"))
    monkeypatch.setattr(hf_ddtree, "load_drafter", lambda *args, **kwargs: tiny_dflash_drafter(model))
    tokenizer = char_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    monkeypatch.setattr(hf_ddtree, "load_embedded", lambda: (model, tokenizer, tiny_dflash_drafter(model)))
    variables = {"hf_ddtree": hf_ddtree, "torch": torch, "model": model, "tokenizer": tokenizer}
    return variables | {"inputs": {"input_ids": random_ids(6)}, "drafter": tiny_dflash_drafter(model)}


@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs(name, names):
    text = "\n".join(example(PUBLIC[name].docstring))
    for step in doctest.DocTestParser().get_examples(text):
        if step.want:
            assert repr(eval(step.source, names)) == step.want.strip()
        else:
            exec(step.source, names)


@pytest.mark.parametrize("page", ["output.md", "extending.md"])
def test_page_runs_and_keeps_the_text(page, names, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks != []
    plain = names["model"].generate(**names["inputs"], max_new_tokens=64)
    for block in blocks:
        names.pop("output", None)
        exec(block, names)
        if "output" in names:
            output = names["output"]
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            assert torch.equal(sequences, plain)


def test_tree_config_describes_the_options_and_the_enforced_maximum():
    assert expected(PUBLIC["TreeConfig"]) == sorted(TREE_OPTIONS)
    assert f"from 1 to {MAX_TREE_BUDGET:,}." in TreeConfig.__doc__
