"""The models of the benchmark's tests."""

import json
from pathlib import Path

import pytest
from helpers import char_tokenizer

from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with a tiny target, a DFlash drafter in `drafter`, a causal LM in `small`, and `prompts.jsonl`."""
    path = tmp_path_factory.mktemp("benchmark")
    target = tiny_model("llama")
    target.save_pretrained(path / "target")
    char_tokenizer().save_pretrained(path / "target")
    tiny_dflash_drafter(target).save_pretrained(path / "drafter")
    tiny_model("llama", seed=1).save_pretrained(path / "small")
    prompts = [{"prompt": "abcab", "kind": "letters"}, {"prompt": "12312", "kind": "digits"}]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    return path
