"""Arguments in every form that plain `generate` takes."""

import types

import pytest
import torch
from helpers import assert_refused, generate, random_ids, scripted, tree_arguments
from transformers import GenerationConfig, LogitsProcessor

import hf_ddtree
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

NEW_TOKENS = 12
PADDING = 3
PROMPT = random_ids(12)
MASK = (torch.arange(12) >= PADDING).long()[None]
DRAFTERS = ["scripted", "dflash", "causal-lm", "look-up"]


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


def with_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that is not contiguous."""
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


DTYPES = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASKS = {
    "absent": None,
    "strided": with_stride(MASK),
    "transposed": MASK.T.contiguous().T,
    **{str(dtype).removeprefix("torch."): MASK.to(dtype) for dtype in DTYPES},
}
IDS = {"int32": PROMPT.int(), "strided": with_stride(PROMPT), "transposed": PROMPT.T.contiguous().T}
SAMPLING = {"greedy": {}, "sampled": {"do_sample": True}}


def assert_tree_equals_plain(model, drafter: str, ids, script_start: int = 0, **settings):
    """Assert equal tokens in the same dtype."""
    settings = {"max_new_tokens": NEW_TOKENS, **settings}
    plain = generate(model, ids, **settings)
    tree = generate(model, ids, **settings, **tree_arguments(drafter, model, plain[:, script_start:]))
    assert tree.tolist() == plain.tolist()
    assert tree.dtype == plain.dtype


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_generate_takes_an_attention_mask_of_every_dtype_and_layout(model, mask, drafter, sampling):
    start = 0 if mask is None else PADDING
    assert_tree_equals_plain(model, drafter, PROMPT, start, attention_mask=mask, **sampling)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("mask", ["bool", "float32"])
def test_generate_takes_a_mask_of_another_dtype_in_every_kind_of_layer(family, mask):
    model = hf_ddtree.enable(tiny_model(family))
    assert_tree_equals_plain(model, "scripted", PROMPT, PADDING, attention_mask=MASKS[mask])


def test_generate_takes_a_mask_of_another_dtype_with_the_kernel(model):
    settings = {"attention_mask": MASKS["bool"], "tree_attention": "triton"}
    plain = generate(model, PROMPT, attention_mask=MASK, max_new_tokens=4)
    arguments = tree_arguments("scripted", model, plain[:, PADDING:])
    assert generate(model, PROMPT, max_new_tokens=4, **settings, **arguments).tolist() == plain.tolist()


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_generate_takes_ids_of_every_dtype_and_layout(model, ids, drafter, sampling):
    assert_tree_equals_plain(model, drafter, ids, **sampling)


@pytest.mark.parametrize("policy", ["hybrid", "swor", "spectr"])
def test_generate_returns_int64_for_int32_ids_with_drawn_children(model, policy):
    options = {"do_sample": True, "assistant_model": tiny_dflash_drafter(model), "tree_budget": 8}
    tree = generate(model, PROMPT.int(), max_new_tokens=NEW_TOKENS, tree_sampling=policy, **options)
    assert tree.dtype == torch.long


MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "lfm2_moe"]


@pytest.mark.parametrize("as_argument", [True, False], ids=["argument", "config"])
@pytest.mark.parametrize("family", MIXTURES)
def test_generate_takes_output_router_logits(family, as_argument):
    model = hf_ddtree.enable(tiny_model(family))
    model.config.get_text_config().output_router_logits = not as_argument
    # not every family has it among the arguments of its forward, and plain generate refuses it then
    settings = {"output_router_logits": True} if as_argument and family != "lfm2_moe" else {}
    assert_tree_equals_plain(model, "scripted", PROMPT, PADDING, attention_mask=MASK, **settings)


def test_generate_drafts_with_a_causal_lm_whose_config_asks_for_router_logits(model):
    drafter = tiny_model("mixtral", output_router_logits=True)
    plain = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    assert generate(model, PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=drafter, tree_budget=8).equal(plain)


class Columns(LogitsProcessor):
    """Drops or adds columns at the end of the scores."""

    def __init__(self, n_columns: int):
        self.n_columns = n_columns

    def __call__(self, input_ids, scores):
        added = scores.new_full((len(scores), max(0, self.n_columns - VOCAB_SIZE)), -torch.inf)
        return torch.cat([scores[:, : self.n_columns], added], dim=1)


@pytest.mark.parametrize("policy", ["target", "hybrid", "swor", "spectr"])
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
@pytest.mark.parametrize("n_columns", [VOCAB_SIZE // 2, VOCAB_SIZE - 1, VOCAB_SIZE + 5])
def test_generate_takes_a_processor_that_changes_the_number_of_columns(model, n_columns, drafter, policy):
    settings = {"max_new_tokens": 24, "do_sample": True, "logits_processor": [Columns(n_columns)]}
    arguments = {**tree_arguments(drafter, model, None), "tree_sampling": policy}
    tree = generate(model, PROMPT, **settings, **arguments)
    assert int(tree[0, 12:].max()) < min(n_columns, VOCAB_SIZE)
    if policy == "target":
        assert tree.equal(generate(model, PROMPT, **settings))


def on_the_instance(model):
    original = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: original(*args, **kwargs), model)
    return model


def on_the_class(model):
    class Wrapper(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Wrapper
    return model


@pytest.mark.parametrize("wrap", [on_the_instance, on_the_class])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("inputs", [{}, {"attention_mask": torch.ones_like(MASK)}], ids=["no mask", "mask"])
def test_generate_takes_a_model_whose_forward_hides_its_parameters(family, wrap, inputs):
    model = hf_ddtree.enable(wrap(tiny_model(family)))
    assert_tree_equals_plain(model, "scripted", PROMPT, **inputs)


def test_generate_takes_a_filled_cache_for_a_forward_that_hides_its_parameters():
    """Without the parameter names, plain generate takes the ids as a continuation of the cache."""
    model, texts = hf_ddtree.enable(on_the_instance(tiny_model("llama"))), []
    for options in ({}, {"tree_budget": 8, "assistant_model": tiny_model("llama")}):
        cache = model(PROMPT, use_cache=True).cache
        texts.append(generate(model, random_ids(5, seed=1), cache=cache, max_new_tokens=NEW_TOKENS, **options).tolist())
    assert texts[0] == texts[1]


def test_check_inputs_refuses_padding_before_a_forward_that_hides_its_parameters():
    model = hf_ddtree.enable(on_the_instance(tiny_model("llama")))
    options = {"attention_mask": MASK, "tree_budget": 8}
    assert_refused(r"position_ids.*functools\.wraps.*without padding", model.generate, PROMPT, **options)


def n_rounds(output) -> int:
    return len(output.rounds) if isinstance(output, hf_ddtree.GenerateDDTreeOutput) else 0


@pytest.mark.parametrize("where", ["argument", "model"])
def test_generate_without_a_budget_by_none_overrides_the_settings(where):
    """None overrides every option of the settings, as it does for the settings of transformers."""
    model = hf_ddtree.enable(tiny_model("llama"))
    options = {"tree_budget": 8, "tree_sampling": "swor", "tree_trace": True}
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **options)
    if where == "model":
        model.generation_config = config
    settings = {"generation_config": config} if where == "argument" else {}
    with_tree, plain = (generate(model, PROMPT, **settings, **more) for more in ({}, {"tree_budget": None}))
    assert n_rounds(with_tree) > 0
    assert n_rounds(plain) == 0
    assert plain.sequences.equal(with_tree.sequences)
    without_trace = generate(model, PROMPT, **settings, tree_trace=None)
    assert without_trace.rounds[0].tree is None
    assert_refused("tree_trace.*tree_budget", model.generate, PROMPT, **settings, tree_budget=None, tree_trace=True)


def test_generate_ignores_options_that_are_false_without_a_budget(model):
    plain = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    options = {"tree_trace": False, "tree_timing": False}
    assert generate(model, PROMPT, max_new_tokens=NEW_TOKENS, **options).equal(plain)


@pytest.mark.parametrize("option", ["tree_trace", "tree_timing"])
def test_check_returned_refuses_an_option_whose_result_is_not_returned(model, option):
    names = f"{option}=True.*return_dict_in_generate=True"
    assert_refused(names, model.generate, PROMPT, tree_budget=8, **{option: True})
    output = generate(model, PROMPT, tree_budget=8, return_dict_in_generate=True, **{option: True}, max_new_tokens=4)
    assert output.rounds[0].seconds or output.rounds[0].tree is not None


def test_check_speculation_refuses_a_look_up_beside_a_drafter(model):
    for drafter in (tiny_model("llama"), tiny_dflash_drafter(model), scripted(PROMPT)):
        options = {"assistant_model": drafter, "prompt_lookup_num_tokens": 4, "tree_budget": 8}
        assert_refused("prompt_lookup_num_tokens=4.*assistant_model.*drop one", model.generate, PROMPT, **options)


def test_check_speculation_takes_dflash_with_a_dflash_drafter_only(model):
    plain = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)
    options = {"speculation_type": "dflash", "tree_budget": 8, "max_new_tokens": NEW_TOKENS}
    for drafter in (tiny_dflash_drafter(model), tiny_muse_glimmer_drafter(model)):
        assert generate(model, PROMPT, assistant_model=drafter, **options).equal(plain)
    for drafter in (None, tiny_model("llama"), scripted(PROMPT)):
        assert_refused("speculation_type='dflash'.*drop it", model.generate, PROMPT, assistant_model=drafter, **options)
