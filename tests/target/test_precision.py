"""The precision that is recorded, and generation where it is not that of the first parameter."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import random_ids, scripted
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_ddtree
from hf_ddtree.comparison import first_difference
from hf_ddtree.target import attention
from hf_ddtree.target.precision import PrecisionRecorder
from hf_ddtree.testing import tiny_model, truncated_copy

PROMPT = random_ids(10)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype, is_low", [(torch.float64, False), (FP32, False), (BF16, True), (torch.float16, True)])
@torch.no_grad()
def test_is_low_holds_below_float32(dtype, is_low):
    model = tiny_model("llama").to(dtype)
    with PrecisionRecorder() as recorder:
        model(input_ids=PROMPT)
    assert dtype in recorder.dtypes and recorder.is_low == is_low


def cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the inputs of a module."""
    module.register_forward_pre_hook(lambda _, args: (args[0].to(dtype), *args[1:]))


def embedding(model) -> None:
    model.get_input_embeddings().float()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.to(BF16))


def head(model) -> None:
    model.lm_head.float()
    cast(model.lm_head, FP32)


def norms(model) -> None:
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()


def router(model) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.float()


def every_other_layer(model) -> None:
    for layer in model.model.layers[::2]:
        layer.float()
    for layer, dtype in zip(model.model.layers, (FP32, BF16, FP32, BF16), strict=True):
        layer.register_forward_pre_hook(functools.partial(cast_layer, dtype=dtype), with_kwargs=True)
    cast(model.model.norm, BF16)


def cast_layer(module, args, kwargs, dtype):
    rotations = tuple(rotation.to(dtype) for rotation in kwargs["position_embeddings"])
    return (args[0].to(dtype), *args[1:]), {**kwargs, "position_embeddings": rotations}


# parts of a bf16 model that are in fp32, and families that can run so
MIXTURES = [
    *((embedding, family) for family in ("llama", "gpt2", "gpt_oss")),
    (head, "llama"),
    *((norms, family) for family in ("gpt2", "gemma3_text")),
    (router, "deepseek_v3"),
    *((every_other_layer, family) for family in ("llama", "gemma3_text")),
]
IDS = [f"{part.__name__}-{family}" for part, family in MIXTURES]


def mixed_model(part, family: str):
    model = tiny_model(family, tie_word_embeddings=False).to(BF16)
    part(model)
    return hf_ddtree.enable(model)


def texts(model) -> tuple[list[int], list[int]]:
    """Return the new tokens of plain and of tree decoding."""
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(PROMPT, **options)
    tree = model.generate(PROMPT, assistant_model=scripted(plain), tree_budget=8, **options)
    return plain[0].tolist(), tree[0].tolist()


@torch.no_grad()
def assert_equal_up_to_ties(model) -> None:
    """Assert that the first token that differs from plain decoding, if any does, was a near-tie."""
    plain, tree = texts(model)
    first = first_difference(tree, plain)
    if first is not None:
        logits = model(input_ids=torch.tensor([plain[:first]])).logits[0, -1].float()
        # In bf16, rounding moves the logits of these models by about 1% of their spread.
        assert abs(float(logits[plain[first]] - logits[tree[first]])) < 0.1 * float(logits.std())


@pytest.mark.parametrize("part, family", MIXTURES, ids=IDS)
def test_generate_equals_plain_where_a_part_is_in_fp32(part, family):
    assert_equal_up_to_ties(mixed_model(part, family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_next", "lfm2"])
def test_generate_equals_plain_under_autocast(family):
    with torch.autocast("cpu", dtype=BF16):
        assert_equal_up_to_ties(hf_ddtree.enable(tiny_model(family)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_generate_equals_plain_in_a_forward_with_autocast(family):
    try:
        model = Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny_model(family))
        assert_equal_up_to_ties(hf_ddtree.enable(model))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_generate_equals_plain_where_one_layer_runs_under_autocast():
    model = tiny_model("llama")
    mlp = model.model.layers[2].mlp
    mlp.forward = torch.autocast("cpu", dtype=BF16)(mlp.forward)
    assert_equal_up_to_ties(hf_ddtree.enable(model))


@pytest.fixture
def mask_dtypes(monkeypatch):
    """Return a set of the dtypes of queries and masks in attention, of the target's trees and the drafter's."""
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    grouped = attention.grouped_attention

    def of_target(query, key, value, mask, scaling):
        if mask is not None and mask.is_floating_point():
            seen.add((query.dtype, mask.dtype))
        return grouped(query, key, value, mask, scaling)

    def of_drafter(module, query, key, value, attention_mask, **kwargs):
        if attention_mask is not None and attention_mask.is_floating_point():
            seen.add((query.dtype, attention_mask.dtype))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(attention, "grouped_attention", of_target)
    AttentionInterface.register("sdpa", of_drafter)
    yield seen
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_verify_gives_layers_a_mask_in_the_dtype_of_their_queries(mask_dtypes):
    texts(mixed_model(embedding, "llama"))
    assert mask_dtypes == {(BF16, BF16)}


def test_draft_gives_layers_a_mask_in_the_dtype_of_their_queries(mask_dtypes):
    drafter = truncated_copy(tiny_model("llama"), 2).to(BF16)
    embedding(drafter)
    target = hf_ddtree.enable(tiny_model("gemma2"))  # its eager attention is not recorded
    target.generate(PROMPT, max_new_tokens=4, assistant_model=drafter, tree_budget=8, do_sample=False)
    assert mask_dtypes == {(BF16, BF16)}
