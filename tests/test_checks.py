"""Refusals at entry: each names the argument, and changes neither the model nor a random state."""

import copy

import pytest
import torch
from helpers import assert_refused, char_tokenizer, generate, random_ids, unchanged
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
)

import hf_ddtree
from hf_ddtree.checks import check_budget, check_cache
from hf_ddtree.enable import resolve_request
from hf_ddtree.request import MAX_TREE_BUDGET, TreeConfig
from hf_ddtree.testing import VOCAB_SIZE, tiny_model

PROMPT = random_ids(12)
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


@pytest.fixture
def usable(model):
    """Return the model, and assert afterwards that it generates as before."""
    with unchanged(model):
        yield model


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
    "look-up-of-no-depth": ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 0}),
    "unknown-attention": ("tree_attention.*flash", {"tree_attention": "flash"}),
}


@pytest.mark.parametrize("names, settings", REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_generate_refuses_settings_that_do_not_work_with_a_tree(usable, names, settings):
    assert_refused(names, usable.generate, PROMPT, max_new_tokens=NEW_TOKENS, tree_budget=8, **settings)


# transformers lets a GenerationConfig carry any field, so a misspelt one cannot be noticed there
IN_A_CONFIG = {name: case for name, case in REFUSED_SETTINGS.items() if name != "misspelt-option"}


@pytest.mark.parametrize("names, settings", IN_A_CONFIG.values(), ids=IN_A_CONFIG)
def test_generate_refuses_them_in_a_generation_config_and_with_a_drafter(usable, names, settings):
    """Arguments that are not settings stay arguments."""
    fields = vars(GenerationConfig())
    as_config = {name: value for name, value in settings.items() if name in fields or name.startswith("tree_")}
    as_argument = {name: value for name, value in settings.items() if name not in as_config}
    generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, tree_budget=8, **as_config)
    arguments = {"assistant_model": usable, "generation_config": generation_config, **as_argument}
    assert_refused(names, usable.generate, PROMPT, **arguments)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "8", MAX_TREE_BUDGET + 1], ids=repr)
def test_check_tree_config_refuses_a_budget_that_is_not_a_positive_int(usable, budget):
    assert_refused(f"tree_budget={budget!r}", usable.generate, PROMPT, max_new_tokens=2, tree_budget=budget)
    generation_config = GenerationConfig(max_new_tokens=2, tree_budget=budget)
    assert_refused(f"tree_budget={budget!r}", usable.generate, PROMPT, generation_config=generation_config)


@pytest.mark.parametrize("option", [{"tree_sampling": "target"}, {"tree_trace": True}, {"tree_timing": True}], ids=str)
def test_check_options_refuses_options_without_a_budget(usable, option):
    assert_refused("tree_budget", usable.generate, PROMPT, max_new_tokens=2, **option)


def test_generate_refuses_a_misspelt_budget(usable):
    assert_refused("tree_bugdet", usable.generate, PROMPT, max_new_tokens=2, tree_bugdet=8)


def test_generate_refuses_tree_options_on_a_disabled_model():
    model = hf_ddtree.disable(hf_ddtree.enable(tiny_model("llama")))
    assert_refused("tree_budget", model.generate, PROMPT, max_new_tokens=2, tree_budget=8)


def open_context(model, **options):
    with model.continuous_batching_context_manager(**options):
        pytest.fail("it started")


CONTINUOUS_BATCHING = {
    "generate_batch": lambda model, **options: model.generate_batch(PROMPT.tolist(), **options),
    "init_continuous_batching": lambda model, **options: model.init_continuous_batching(**options),
    "continuous_batching_context_manager": open_context,
}
TREE_OPTIONS = [
    *({"tree_budget": value} for value in (8, 0, "auto", "x")),
    {"tree_sampling": "x"},
    {"tree_attention": "sdpa"},
    {"tree_trace": True},
    {"tree_timing": True},
]


@pytest.mark.parametrize("start", CONTINUOUS_BATCHING.values(), ids=CONTINUOUS_BATCHING)
@pytest.mark.parametrize("option", TREE_OPTIONS, ids=str)
def test_check_continuous_batching_refuses_every_tree_option(usable, monkeypatch, start, option):
    [(name, value)] = option.items()
    settings = copy.deepcopy(usable.generation_config)
    setattr(settings, name, value)
    for options in (option, {"generation_config": settings}):
        assert_refused(f"{name}={value!r}: continuous batching", start, usable, **options)
    with monkeypatch.context() as patch:
        patch.setattr(usable, "generation_config", settings)
        assert_refused(f"{name}={value!r}: continuous batching", start, usable)


def test_generate_batch_without_a_tree_equals_plain(model):
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    settings.tree_budget, settings.tree_trace = None, False
    config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
    implementation = model.config._attn_implementation
    [output] = model.generate_batch(PROMPT.tolist(), settings, config).values()
    model.set_attn_implementation(implementation)
    assert output.generated_tokens == generate(model, PROMPT, max_new_tokens=4)[0, 12:].tolist()


def test_check_inputs_refuses_a_batch(usable):
    assert_refused("input_ids", usable.generate, PROMPT.repeat(2, 1), max_new_tokens=2, tree_budget=8)


def test_check_cache_refuses_a_static_cache(usable):
    cache = StaticCache(config=usable.config, max_cache_len=64)
    assert_refused("cache", usable.generate, PROMPT, max_new_tokens=2, tree_budget=8, cache=cache)


def test_check_cache_refuses_offloading(usable):
    check_cache(DynamicCache(config=usable.config))
    offloaded = DynamicCache(config=usable.config)
    offloaded.offloading = True
    assert_refused("cache: .*offloaded", check_cache, offloaded)


def test_check_budget_refuses_an_automatic_one_on_several_ranks(model, monkeypatch):
    auto, fixed = (resolve_request(TreeConfig(budget), GenerationConfig(max_length=20)) for budget in ("auto", 8))
    check_budget(model, auto)
    monkeypatch.setattr(type(model), "tp_size", 2)
    check_budget(model, fixed)
    assert_refused("tree_budget='auto'", check_budget, model, auto)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_check_model_refuses_attention_that_takes_no_tree_mask(usable, monkeypatch, implementation):
    with monkeypatch.context() as patch:
        patch.setattr(usable.config, "_attn_implementation_internal", implementation)
        assert_refused("attn_implementation", usable.generate, PROMPT, max_new_tokens=2, tree_budget=8)
    fresh = tiny_model("llama")
    fresh.config._attn_implementation_internal = implementation
    assert_refused("attn_implementation", hf_ddtree.enable, fresh)
    assert type(fresh) is LlamaForCausalLM


def test_generate_refuses_dropout():
    """With dropout every forward differs, which the self-check must not take for rounding."""
    noisy = hf_ddtree.enable(tiny_model("llama", attention_dropout=0.5)).train()
    assert_refused(r"model\.eval\(\)", noisy.generate, PROMPT, max_new_tokens=2, tree_budget=8)


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
TINY = {**SMALL, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
# model type -> what the error must name, and config fields
UNSUPPORTED_MODELS = {
    "mamba": ("only recurrent layers", {**SMALL, "state_size": 4}),
    "llama4_text": ("chunked", {**TINY, **EXPERTS, "intermediate_size_mlp": 64}),
    "rwkv": ("only recurrent layers", SMALL),
}


@pytest.mark.parametrize("model_type", UNSUPPORTED_MODELS)
def test_check_model_refuses_layers_that_cannot_hold_a_tree(model_type):
    names, fields = UNSUPPORTED_MODELS[model_type]
    config = AutoConfig.for_model(model_type, **fields)
    unsupported = AutoModelForCausalLM.from_config(config).eval()
    own_class = type(unsupported)
    assert_refused(names, hf_ddtree.enable, unsupported)
    assert type(unsupported) is own_class


def test_check_model_refuses_an_encoder_decoder():
    fields = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **fields)).eval()
    assert_refused("encoder-decoder", hf_ddtree.enable, t5)


def test_check_class_refuses_what_is_not_a_causal_lm():
    without_head = AutoModel.from_config(tiny_model("llama").config)
    for other in [without_head, torch.nn.Linear(2, 2), "gpt2", None]:
        assert_refused("model", hf_ddtree.enable, other)


# torch warns itself while it imports its compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_check_class_refuses_a_compiled_model_with_the_way_out():
    assert_refused(r"torch\.compile.*enable the model inside", hf_ddtree.enable, torch.compile(tiny_model("llama")))


def test_check_class_refuses_a_wrapper_with_the_way_out():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_model = tiny_model("llama")

        def get_base_model(self):
            return self.base_model

    assert_refused(r"Wrapper.*get_base_model\(\)", hf_ddtree.enable, Wrapper())
