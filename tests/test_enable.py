"""Enabling a model changes its `generate` and nothing else, and the tree options reach the loop from everywhere."""

import copy
import json
import pickle

import pytest
import torch
from helpers import assert_refused, char_tokenizer, generate, random_ids
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, pipeline

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

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


@pytest.mark.parametrize("with_drafter", [False, True], ids=["look-up", "drafter"])
def test_generate_takes_tree_options_from_a_pipeline(model, with_drafter):
    tokenizer = char_tokenizer()
    drafter = {"assistant_model": tiny_model("llama", seed=1)} if with_drafter else {}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain_pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    tree_pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **drafter)
    assert tree_pipe("Hello", tree_budget=8, **settings) == plain_pipe("Hello", **settings)


# peft uses an older name of a transformers attribute
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_generate_of_a_peft_model_uses_a_tree_through_its_base_model():
    peft = pytest.importorskip("peft", reason="needs peft, which `make test` installs")
    base = tiny_model("llama")
    without_adapter = generate(base, PROMPT, max_new_tokens=NEW_TOKENS)
    # adapters start at zero by default, and random ones change the output
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, config).eval()
    plain = adapted.generate(input_ids=PROMPT, max_new_tokens=NEW_TOKENS)
    assert plain.tolist() != without_adapter.tolist()
    assert_refused(r"get_base_model\(\)", hf_ddtree.enable, adapted)
    hf_ddtree.enable(adapted.get_base_model())
    for drafter in [None, adapted.get_base_model(), tiny_dflash_drafter(base)]:
        settings = {"max_new_tokens": NEW_TOKENS, "tree_budget": 8, "assistant_model": drafter}
        output = adapted.generate(input_ids=PROMPT, return_dict_in_generate=True, **settings)
        assert output.sequences.tolist() == plain.tolist() and output.rounds
