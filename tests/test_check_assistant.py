"""Refusals of an `assistant_model` that does not fit, before anything runs."""

import pytest
import torch
from helpers import assert_refused, char_tokenizer, generate, random_ids, unchanged
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_ddtree
from hf_ddtree.checks import MAX_VOCAB_PADDING, check_assistant, check_causal_lm, check_dflash
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter, truncated_copy

PROMPT = random_ids(12)


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


def dflash_fields(**fields) -> dict:
    return {"mask_token_id": 3, "target_layer_ids": [0, 2], **fields}


def encoder_decoder():
    fields = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB_SIZE}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **fields)).eval()


def recurrent_model():
    fields = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **fields)).eval()


# what the error must name, and what makes the drafter
MISFITS = {
    "causal-LM-vocabulary": (
        f"vocabulary has {VOCAB_SIZE + MAX_VOCAB_PADDING + 1} tokens, the target's {VOCAB_SIZE}.*another tokenizer",
        lambda model: tiny_model("llama", vocab_size=VOCAB_SIZE + MAX_VOCAB_PADDING + 1),
    ),
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
    "an-encoder-decoder": ("assistant_model", lambda model: encoder_decoder()),
    "a-recurrent-model": ("assistant_model", lambda model: recurrent_model()),
    "learned-positions": (
        "assistant_model.*learned positions for 13 tokens.*needs 14",
        lambda model: tiny_model("gpt2", n_positions=13, max_position_embeddings=13),
    ),
    "a-hybrid-model": ("assistant_model.*linear_attention", lambda model: tiny_model("qwen3_next")),
    "training-mode": (
        "assistant_model: the drafter is in training mode",
        lambda model: truncated_copy(model, 2).train(),
    ),
}


@pytest.mark.parametrize("names, make_drafter", MISFITS.values(), ids=MISFITS)
def test_check_assistant_refuses_a_drafter_that_does_not_fit(model, names, make_drafter):
    options = {"max_new_tokens": 4, "assistant_model": make_drafter(model), "tree_budget": 8}
    with unchanged(model):
        assert_refused(names, model.generate, PROMPT, **options)


@pytest.mark.parametrize(
    "make_drafter",
    [lambda model: None, tiny_dflash_drafter, tiny_muse_glimmer_drafter, lambda model: truncated_copy(model, 2)],
    ids=["look-up", "DFlash", "Muse-Glimmer", "causal-LM"],
)
def test_check_assistant_lets_a_drafter_that_fits_pass(model, make_drafter):
    check_assistant(make_drafter(model), model, n_tokens=16)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 16}, "hidden_size is 16, the target's 32"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}}, r"target_layer_ids \[4\] are outside"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 2]}}, r"target_layer_ids \[-1\] are outside"),
        ({"num_target_layers": 36}, "num_target_layers is 36, but the target has 4"),
        ({"vocab_size": 200}, "vocab_size is 200, the target's 128"),
        ({"dflash_config": {"mask_token_id": 128, "target_layer_ids": [0, 2]}}, "mask_token_id 128 is outside"),
        ({"block_size": 1}, "block_size of at least 2"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, r"lacks dflash_config\.mask_token_id"),
    ],
)
def test_check_dflash_names_the_field_and_both_values(model, fields, message):
    drafter = tiny_dflash_drafter(model, **fields)
    assert_refused(f"assistant_model: .*{message}", check_dflash, drafter, model)
    options = {"max_new_tokens": 4, "assistant_model": drafter, "tree_budget": 4}
    assert_refused(f"assistant_model: .*{message}", model.generate, PROMPT, **options)


@pytest.mark.parametrize(
    "make_drafter", [tiny_dflash_drafter, tiny_muse_glimmer_drafter], ids=["DFlash", "Muse-Glimmer"]
)
@pytest.mark.parametrize("budget", [{}, {"tree_budget": None}], ids=["none", "None"])
def test_check_plain_arguments_refuses_a_dflash_model_without_a_budget(model, make_drafter, budget):
    options = {"max_new_tokens": 4, "assistant_model": make_drafter(model), **budget}
    assert_refused("assistant_model: a .* drafts trees; pass tree_budget", model.generate, PROMPT, **options)


@pytest.mark.parametrize(
    "make_drafter", [tiny_dflash_drafter, tiny_muse_glimmer_drafter], ids=["DFlash", "Muse-Glimmer"]
)
def test_check_plain_arguments_leaves_transformers_own_mode_alone(model, make_drafter):
    plain = generate(model, PROMPT, max_new_tokens=8)
    options = {"assistant_model": make_drafter(model), "speculation_type": "dflash"}
    assert generate(model, PROMPT, max_new_tokens=8, **options).tolist() == plain.tolist()


def test_check_arguments_takes_the_targets_own_tokenizer_for_the_drafter(model):
    """A pipeline passes both, if it finds that the configs name other special tokens."""
    own, other = char_tokenizer(), char_tokenizer()
    plain = generate(model, PROMPT, max_new_tokens=8)
    options = {"assistant_model": tiny_dflash_drafter(model), "tree_budget": 8, "tokenizer": own}
    output = generate(model, PROMPT, max_new_tokens=8, assistant_tokenizer=own, **options)
    assert output.tolist() == plain.tolist()
    assert_refused("assistant_tokenizer", model.generate, PROMPT, assistant_tokenizer=other, **options)


def test_check_causal_lm_counts_learned_positions_only(model):
    """Rotary positions go on beyond `max_position_embeddings`, and learned ones end there."""
    check_causal_lm(tiny_model("gpt2", n_positions=14, max_position_embeddings=14), model, n_tokens=16)
    check_causal_lm(tiny_model("llama", max_position_embeddings=14), model, n_tokens=20)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("n_positions", [20, 21])
def test_check_causal_lm_lets_a_drafter_use_all_of_its_positions(model, n_positions, padding):
    """The drafter never runs the last two tokens, and padding needs no position."""
    drafter = tiny_model("gpt2", n_positions=n_positions, max_position_embeddings=n_positions)
    drafter.generation_config.assistant_confidence_threshold = 0.0  # grow to the last level
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(12)], dim=1)
    inputs = {"attention_mask": (torch.arange(12 + padding) >= padding).long()[None]}
    fits = {"max_new_tokens": n_positions - 12 + 2, **inputs}
    options = {"assistant_model": drafter, "tree_budget": 16}
    assert generate(model, ids, **fits, **options).equal(generate(model, ids, **fits))
    crossing = {**fits, "max_new_tokens": fits["max_new_tokens"] + 1}
    assert_refused(f"learned positions for {n_positions} tokens", model.generate, ids, **crossing, **options)
