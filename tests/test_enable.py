"""Enabling a model changes its `generate` and nothing else, and the tree options reach the loop from everywhere."""

import copy
import json
import pickle

import pytest
import torch
from helpers import char_tokenizer, generate, random_ids
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, pipeline

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT = random_ids(12)
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


def test_enable_and_disable_change_the_class_and_return_the_model():
    model = tiny_model("llama")
    attributes = set(vars(model))
    assert hf_ddtree.disable(model) is model and type(model) is LlamaForCausalLM
    assert hf_ddtree.enable(model) is model
    enabled = type(model)
    assert enabled is not LlamaForCausalLM and isinstance(model, LlamaForCausalLM)
    for name in ["__name__", "__qualname__", "__module__", "__doc__"]:
        assert getattr(enabled, name) == getattr(LlamaForCausalLM, name)
    assert hf_ddtree.enable(model) is model and type(model) is enabled
    assert hf_ddtree.disable(model) is model and type(model) is LlamaForCausalLM
    assert set(vars(model)) == attributes


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_enable_leaves_plain_generate_alone(settings):
    """The tokens, the use of the random state and the kind of output stay, also for beams and native drafting."""
    model = tiny_model("llama")
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
    expected = generate(model, PROMPT, **settings)
    state = torch.get_rng_state()
    hf_ddtree.enable(model)
    output = generate(model, PROMPT, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert type(output) is type(expected) and set(output) == set(expected)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_enable_survives_copying(make_copy):
    model = hf_ddtree.enable(tiny_model("llama"))
    expected = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    copied = make_copy(model)
    assert type(copied) is type(model)
    # the copy has weights of its own, and generates from them
    with torch.no_grad():
        model.lm_head.weight.zero_()
    output = generate(copied, PROMPT, max_new_tokens=NEW_TOKENS, tree_budget=8, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist() and output.rounds
    assert type(hf_ddtree.disable(copied)) is LlamaForCausalLM


def test_enable_leaves_no_trace_in_a_saved_model(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    hf_ddtree.enable(model)
    expected = generate(model, PROMPT, max_new_tokens=NEW_TOKENS, tree_budget=8)
    model.generate(PROMPT, generation_config=GenerationConfig(max_new_tokens=2, tree_budget=8))
    model.save_pretrained(tmp_path / "enabled")
    plain_config, config = (json.loads((tmp_path / name / "config.json").read_text()) for name in ["plain", "enabled"])
    assert config == plain_config and config["architectures"] == ["LlamaForCausalLM"]
    plain_text, text = ((tmp_path / name / "generation_config.json").read_text() for name in ["plain", "enabled"])
    assert text == plain_text and "tree" not in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert type(loaded) is LlamaForCausalLM
    assert generate(loaded, PROMPT, max_new_tokens=NEW_TOKENS).tolist() == expected.tolist()


def test_generate_takes_tree_options_from_a_generation_config(model):
    """An argument of the call takes precedence, and the config itself stays as it was."""
    plain = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    tree_options = {"tree_budget": 8, "tree_trace": True}
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **tree_options)
    before = copy.deepcopy(vars(config))
    output = generate(model, PROMPT, generation_config=config)
    assert output.sequences.tolist() == plain.tolist()
    assert output.rounds and all(len(r.tree) == r.tree_size + 1 for r in output.rounds)
    narrow = generate(model, PROMPT, generation_config=config, tree_budget=1, assistant_model=model)
    assert {r.tree_size for r in narrow.rounds[:-1]} == {1}
    assert vars(config) == before


def test_generate_takes_tree_options_from_the_models_own_generation_config():
    model = hf_ddtree.enable(tiny_model("llama"))
    model.generation_config.tree_budget = 8
    output = generate(model, PROMPT, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    assert output.rounds


def test_generate_forgets_the_tree_options_of_a_call(model):
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    before = copy.deepcopy(vars(model.generation_config))
    assert "rounds" in generate(model, PROMPT, tree_budget=8, **settings)
    assert "rounds" not in generate(model, PROMPT, **settings)
    assert vars(model.generation_config) == before


def foreign_drafter(model):
    """Return a DFlash model whose config names no special tokens, as published ones do."""
    return tiny_dflash_drafter(model, bos_token_id=None, pad_token_id=None)


# the drafter, and whether a pipeline takes it when it is made. If it does not, it takes it in every call.
PIPELINE_DRAFTERS = {
    "look-up": (lambda model: None, True),
    "causal-lm": (lambda model: tiny_model("llama", seed=1), True),
    "padded-causal-lm": (lambda model: tiny_model("llama", seed=1, vocab_size=136), False),
    "dflash": (tiny_dflash_drafter, True),
    "dflash-without-special-tokens": (foreign_drafter, False),
    "muse-glimmer": (tiny_muse_glimmer_drafter, False),
}


@pytest.mark.parametrize("make_drafter, when_made", PIPELINE_DRAFTERS.values(), ids=PIPELINE_DRAFTERS)
def test_generate_takes_tree_options_from_a_pipeline(model, make_drafter, when_made):
    tokenizer, drafter = char_tokenizer(), {"assistant_model": make_drafter(model)}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    plain = pipe("Hello", **settings)
    assert pipe("Hello", tree_budget=8, **drafter, **settings) == plain
    if when_made:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **drafter)
        assert pipe("Hello", tree_budget=8, **settings) == plain
    # transformers asks for a tokenizer, if the configs differ, and the target's own one is right
    if hasattr(getattr(drafter["assistant_model"], "config", None), "vocab_size"):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_tokenizer=tokenizer, **drafter)
        assert pipe("Hello", tree_budget=8, **settings) == plain
