"""What cannot work is refused at entry and changes nothing; enabling a model changes nothing but its `generate`."""

import copy
import json
import pickle
import random

import numpy as np
import pytest
import torch
from helpers import char_tokenizer, generate, random_ids
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
    pipeline,
)

import hf_ddtree
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT = random_ids(12)
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


@pytest.fixture
def usable(model):
    """The model; afterwards it generates as before, with and without a tree."""
    before = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    settings = vars(copy.deepcopy(model.generation_config))
    yield model
    assert vars(model.generation_config) == settings
    assert generate(model, PROMPT, max_new_tokens=NEW_TOKENS).tolist() == before.tolist()
    assert generate(model, PROMPT, max_new_tokens=NEW_TOKENS, tree_budget=8).tolist() == before.tolist()


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def assert_refused(names: str, call, *args, **kwargs):
    """A ValueError whose text names what is wrong, raised before anything random happened."""
    states = random_states()
    with pytest.raises(ValueError, match=names):
        call(*args, **kwargs)
    assert random_states() == states


def other_loop(model, input_ids, **kwargs):
    return input_ids


# what the error must name, and the settings
REFUSED_SETTINGS = {
    "beams": ("num_beams", {"num_beams": 2}),
    "sampled-beams": ("num_beams", {"num_beams": 2, "do_sample": True}),
    "several-sequences": ("num_return_sequences", {"num_return_sequences": 2, "do_sample": True}),
    "no-cache": ("use_cache", {"use_cache": False}),
    "static-cache": ("cache_implementation", {"cache_implementation": "static"}),
    "offloaded-static-cache": ("cache_implementation", {"cache_implementation": "offloaded_static"}),
    "quantised-cache": ("cache_implementation", {"cache_implementation": "quantized"}),
    "paged-cache": ("cache_implementation", {"cache_implementation": "paged"}),
    "attentions": ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    "second-tokenizer": ("assistant_tokenizer", {"assistant_tokenizer": char_tokenizer()}),
    "early-exit": ("assistant_early_exit", {"assistant_early_exit": 2}),
    "ensemble": ("assistant_ensemble_weight", {"assistant_ensemble_weight": 0.5}),
    "multi-token-prediction": ("use_mtp", {"use_mtp": True}),
    "contrastive-search": ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    "diverse-beams": ("num_beam", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}),
    "forced-words": ("num_beams|force_words_ids", {"num_beams": 2, "force_words_ids": [[5]]}),
    "DoLa": ("dola_layers", {"dola_layers": "high"}),
    "custom-loop": ("custom_generate", {"custom_generate": other_loop}),
    "unknown-sampling": ("tree_sampling.*greedy", {"tree_sampling": "greedy"}),
    "trace-not-a-bool": ("tree_trace", {"tree_trace": "yes"}),
    "timing-not-a-bool": ("tree_timing", {"tree_timing": 1}),
    "misspelt-option": ("tree_smapling", {"tree_smapling": "target"}),
}


@pytest.mark.parametrize("names, settings", REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_a_setting_that_does_not_go_with_a_tree_is_refused(usable, names, settings):
    assert_refused(names, usable.generate, PROMPT, max_new_tokens=NEW_TOKENS, tree_budget=8, **settings)


# transformers lets a GenerationConfig carry any field, so a misspelt one cannot be noticed there
IN_A_CONFIG = {name: case for name, case in REFUSED_SETTINGS.items() if name != "misspelt-option"}


@pytest.mark.parametrize("names, settings", IN_A_CONFIG.values(), ids=IN_A_CONFIG)
def test_it_is_refused_with_a_drafter_and_a_budget_in_the_generation_config_too(usable, names, settings):
    """The other way to ask for a tree; arguments that are no settings stay arguments."""
    fields = vars(GenerationConfig())
    as_config = {name: value for name, value in settings.items() if name in fields or name.startswith("tree_")}
    as_argument = {name: value for name, value in settings.items() if name not in as_config}
    generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, tree_budget=8, **as_config)
    arguments = {"assistant_model": usable, "generation_config": generation_config, **as_argument}
    assert_refused(names, usable.generate, PROMPT, **arguments)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "8"], ids=repr)
def test_a_budget_that_is_no_positive_int_is_refused(usable, budget):
    assert_refused(f"tree_budget={budget!r}", usable.generate, PROMPT, max_new_tokens=2, tree_budget=budget)
    generation_config = GenerationConfig(max_new_tokens=2, tree_budget=budget)
    assert_refused(f"tree_budget={budget!r}", usable.generate, PROMPT, generation_config=generation_config)


@pytest.mark.parametrize("option", [{"tree_sampling": "target"}, {"tree_trace": True}, {"tree_timing": True}], ids=str)
def test_tree_options_without_a_budget_are_refused(usable, option):
    assert_refused("tree_budget", usable.generate, PROMPT, max_new_tokens=2, **option)


def test_a_misspelt_budget_is_refused(usable):
    assert_refused("tree_bugdet", usable.generate, PROMPT, max_new_tokens=2, tree_bugdet=8)


def test_a_batch_is_refused(usable):
    assert_refused("input_ids", usable.generate, PROMPT.repeat(2, 1), max_new_tokens=2, tree_budget=8)


def test_a_static_cache_passed_in_is_refused(usable):
    cache = StaticCache(config=usable.config, max_cache_len=64)
    assert_refused("cache", usable.generate, PROMPT, max_new_tokens=2, tree_budget=8, cache=cache)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_attention_that_takes_no_tree_mask_is_refused(usable, monkeypatch, implementation):
    monkeypatch.setattr(usable.config, "_attn_implementation_internal", implementation)
    assert_refused("attn_implementation", usable.generate, PROMPT, max_new_tokens=2, tree_budget=8)
    fresh = tiny_model("llama")
    fresh.config._attn_implementation_internal = implementation
    assert_refused("attn_implementation", hf_ddtree.enable, fresh)
    assert type(fresh) is LlamaForCausalLM


def test_dropout_is_refused():
    """Every forward is another one then: the check of the model must not take that for rounding."""
    noisy = hf_ddtree.enable(tiny_model("llama", attention_dropout=0.5)).train()
    assert_refused(r"model\.eval\(\)", noisy.generate, PROMPT, max_new_tokens=2, tree_budget=8)


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
TINY = {**SMALL, "intermediate_size": 64, "head_dim": 8}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
# model type -> what the error must name, and config fields
UNSUPPORTED_MODELS = {
    "mamba": ("nothing but recurrent layers", {**SMALL, "state_size": 4}),
    "llama4_text": ("chunked", {**TINY, **ATTENTION, **EXPERTS, "intermediate_size_mlp": 64}),
    "rwkv": ("nothing but recurrent layers", SMALL),
}


def unsupported_model(model_type: str):
    config = AutoConfig.for_model(model_type, **UNSUPPORTED_MODELS[model_type][1])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def t5():
    fields = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **fields)).eval()


@pytest.mark.parametrize("model_type", UNSUPPORTED_MODELS)
def test_a_model_whose_layers_cannot_hold_a_tree_is_refused(model_type):
    unsupported = unsupported_model(model_type)
    own_class = type(unsupported)
    assert_refused(UNSUPPORTED_MODELS[model_type][0], hf_ddtree.enable, unsupported)
    assert type(unsupported) is own_class


def test_an_encoder_decoder_is_refused(t5):
    assert_refused("encoder-decoder", hf_ddtree.enable, t5)


def test_what_is_no_causal_lm_is_refused():
    without_head = AutoModel.from_config(tiny_model("llama").config)
    for other in [without_head, torch.nn.Linear(2, 2), "gpt2", None]:
        assert_refused("model", hf_ddtree.enable, other)


ROPE = {
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 24,
        },
    ),
}


def rope_model(rope_type: str):
    """Its frequencies change at 24 tokens."""
    family, rope = ROPE[rope_type]
    longest = {"max_position_embeddings": 24} if rope_type == "dynamic" else {"original_max_position_embeddings": 24}
    return hf_ddtree.enable(tiny_model(family, rope_parameters=rope, **longest))


@pytest.mark.parametrize("rope_type", ROPE)
def test_a_request_that_crosses_a_change_of_rope_is_refused(rope_type):
    model = rope_model(rope_type)
    assert_refused(f"max_length.*{rope_type}", model.generate, PROMPT, max_new_tokens=13, tree_budget=8)


@pytest.mark.parametrize("rope_type, prompt_length", [("dynamic", 12), ("longrope", 12), ("longrope", 25)])
def test_a_request_on_one_side_of_a_change_of_rope_equals_plain_generate(rope_type, prompt_length):
    model, prompt = rope_model(rope_type), random_ids(prompt_length)
    plain = generate(model, prompt, max_new_tokens=12)
    assert generate(model, prompt, max_new_tokens=12, tree_budget=8, assistant_model=model).tolist() == plain.tolist()


def dflash_fields(**fields):
    return {"mask_token_id": 3, "target_layer_ids": [0, 2], **fields}


MISFITS = {
    "causal-LM-vocabulary": ("vocabulary", lambda model: tiny_model("llama", vocab_size=VOCAB_SIZE + 8)),
    "DFlash-vocabulary": ("vocab_size", lambda model: tiny_dflash_drafter(model, vocab_size=VOCAB_SIZE + 8)),
    "hidden-size": ("hidden_size", lambda model: tiny_dflash_drafter(model, hidden_size=16)),
    "mask-id-outside": (
        "mask_token_id",
        lambda model: tiny_dflash_drafter(model, dflash_config=dflash_fields(mask_token_id=VOCAB_SIZE)),
    ),
    "negative-mask-id": (
        "mask_token_id",
        lambda model: tiny_dflash_drafter(model, dflash_config=dflash_fields(mask_token_id=-1)),
    ),
    "tapped-layers-outside": (
        "target_layer_ids",
        lambda model: tiny_dflash_drafter(model, dflash_config=dflash_fields(target_layer_ids=[0, 4])),
    ),
    "number-of-layers": ("num_target_layers", lambda model: tiny_dflash_drafter(model, num_target_layers=5)),
    "Muse-Glimmer-hidden-size": (
        "hidden_size",
        lambda model: tiny_muse_glimmer_drafter(tiny_model("llama", hidden_size=64)),
    ),
    "a-path": ("assistant_model.*load_drafter", lambda model: "some/drafter"),
    "a-module": ("assistant_model", lambda model: torch.nn.Linear(2, 2)),
    "a-model-without-head": ("assistant_model", lambda model: AutoModel.from_config(model.config)),
    "an-encoder-decoder": ("assistant_model", "t5"),
    "a-recurrent-model": ("assistant_model", lambda model: unsupported_model("mamba")),
    "learned-positions": (
        "assistant_model.*learned positions for 14 tokens.*max_length=16",
        lambda model: tiny_model("gpt2", n_positions=14, max_position_embeddings=14),
    ),
    "a-hybrid-model": ("assistant_model.*linear_attention", lambda model: tiny_model("qwen3_next")),
}


@pytest.mark.parametrize("names, make_drafter", MISFITS.values(), ids=MISFITS)
def test_a_drafter_that_does_not_fit_is_refused(usable, t5, names, make_drafter):
    drafter = t5 if make_drafter == "t5" else make_drafter(usable)
    assert_refused(names, usable.generate, PROMPT, max_new_tokens=4, assistant_model=drafter, tree_budget=8)


def test_continuous_batching_with_a_budget_is_refused(usable):
    settings = copy.deepcopy(usable.generation_config)
    settings.tree_budget = 8
    for options in ({"tree_budget": 8}, {"generation_config": settings}):
        assert_refused("tree_budget: generate_batch", usable.generate_batch, PROMPT.tolist(), **options)


DRAFTERS = {
    "look-up": lambda model: None,
    "causal-LM": lambda model: tiny_model("llama", seed=1),
    "itself": lambda model: model,
    "DFlash": tiny_dflash_drafter,
    "Muse-Glimmer": tiny_muse_glimmer_drafter,
}


@pytest.mark.parametrize("make_drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_a_greedy_run_leaves_every_global_random_state_alone(make_drafter):
    """On a fresh model, so that its check is part of the run."""
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter = make_drafter(model)
    states = random_states()
    model.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=drafter, tree_budget=8)
    assert random_states() == states


@pytest.mark.parametrize("make_drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_a_sampled_run_uses_the_global_random_state_as_plain_sampling_does(make_drafter):
    """So a script that samples twice after one seed gives the same two texts."""
    model = hf_ddtree.enable(tiny_model("llama"))
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True}
    plain = generate(model, PROMPT, **settings)
    state = torch.get_rng_state()
    options = {"assistant_model": make_drafter(model), "tree_budget": 8, "tree_sampling": "target"}
    tree = generate(model, PROMPT, **options, **settings)
    assert tree.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), state)


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


def test_a_disabled_model_refuses_tree_options_as_transformers_does():
    model = hf_ddtree.disable(hf_ddtree.enable(tiny_model("llama")))
    assert_refused("tree_budget", model.generate, PROMPT, max_new_tokens=2, tree_budget=8)


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_plain_generate_of_an_enabled_model_is_untouched(settings):
    """The same tokens, the same use of the random state, the same kind of output; beams and native drafting too."""
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
def test_a_copy_of_an_enabled_model_is_enabled(make_copy):
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


def test_an_enabled_model_saves_and_loads_as_the_model_it_is(tmp_path):
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


def test_tree_options_in_a_generation_config(model):
    """A call's own argument goes before it; the config itself is left as it was."""
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


def test_tree_options_in_the_models_own_generation_config():
    model = hf_ddtree.enable(tiny_model("llama"))
    model.generation_config.tree_budget = 8
    output = generate(model, PROMPT, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    assert output.rounds


@pytest.mark.parametrize("with_drafter", [False, True], ids=["look-up", "drafter"])
def test_a_text_generation_pipeline_takes_tree_arguments(model, with_drafter):
    tokenizer = char_tokenizer()
    drafter = {"assistant_model": tiny_model("llama", seed=1)} if with_drafter else {}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain_pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    tree_pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **drafter)
    assert tree_pipe("Hello", tree_budget=8, **settings) == plain_pipe("Hello", **settings)


# torch's own, while it imports its compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_refused_with_the_way_out():
    assert_refused("torch.compile.*enable the model inside", hf_ddtree.enable, torch.compile(tiny_model("llama")))


def test_a_wrapper_is_refused_with_the_way_out():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_model = tiny_model("llama")

        def get_base_model(self):
            return self.base_model

    assert_refused(r"Wrapper.*get_base_model\(\)", hf_ddtree.enable, Wrapper())


# peft's own: it still uses an older name of a transformers attribute
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_peft_model_generates_with_a_tree_through_its_base_model():
    peft = pytest.importorskip("peft", reason="needs peft, which `make test` installs")
    base = tiny_model("llama")
    without_adapter = generate(base, PROMPT, max_new_tokens=NEW_TOKENS)
    # adapters start at zero: random ones change the output
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
