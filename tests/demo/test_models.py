"""Loading models by path, in the dtype that the visitor chooses."""

import pytest
import torch
from demo.support import ask, finish
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Models
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a target, its tokenizer and a drafter."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama", vocab_size=1024)
    model.save_pretrained(folder / "model")
    tiny_dflash_drafter(model).save_pretrained(folder / "drafter")
    tokenizer = Tokenizer(WordLevel({"a": 5, "b": 6, "?": 7}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize("drafter", [DRAFTER, PROMPT_LOOKUP])
def test_get_loads_a_target_and_a_drafter_by_path(drafter, folder):
    models = Models(str(folder / "model"), str(folder / "drafter"))
    loaded = models.get("float32")
    assert finish(loaded, ask("a b a b", drafter=drafter)).verdict.kind == "identical"
    assert models.get("float32") is loaded
    assert models.drafter_label.endswith("drafter")


def test_get_loads_another_dtype(folder):
    models = Models(str(folder / "model"), str(folder / "drafter"))
    models.get("float32")
    assert models.get("bfloat16").model.dtype == models.loaded.drafters[DRAFTER].dtype == torch.bfloat16


def test_get_offers_only_prompt_lookup_without_a_drafter(folder):
    assert list(Models(str(folder / "model")).get("float32").drafters) == [PROMPT_LOOKUP]


def test_get_refuses_an_unknown_dtype():
    with pytest.raises(ValueError, match="float8"):
        Models().get("float8")
