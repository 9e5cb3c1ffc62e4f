"""The self-check: it passes every supported family and refuses models that it must not pass."""

import pytest
import torch

import hf_ddtree
from hf_ddtree.target import selfcheck
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.selfcheck import check_tree_forward
from hf_ddtree.testing import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    INCONSISTENT_FAMILIES,
    RECURRENT_FAMILIES,
    VOCAB_SIZE,
    tiny_model,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, *GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES])
def test_check_tree_forward_passes_every_family(family, dtype):
    check_tree_forward(tiny_model(family).to(dtype), CPU, MaskedForward)


@pytest.mark.parametrize("family", INCONSISTENT_FAMILIES)
def test_check_tree_forward_refuses_models_that_continue_a_cached_text_inconsistently(family):
    model = tiny_model(family)
    with pytest.raises(ValueError, match="something else over several tokens"):
        hf_ddtree.enable(model)
    if family != "nemotron_h":  # its difference is too small for the check
        with pytest.raises(ValueError, match=r"token by token|does not support tree decoding"):
            check_tree_forward(model, CPU, MaskedForward)


@torch.no_grad()
def test_check_tree_forward_allows_logits_that_are_masked_or_constant():
    """Padded vocabularies are often masked with -inf, and an untrained head may be zero."""
    for weight, bias in ((1.0, -torch.inf), (0.0, 0.0)):
        model = tiny_model("llama", tie_word_embeddings=False)
        model.lm_head.weight.mul_(weight)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE))
        model.lm_head.bias[100:] = bias
        check_tree_forward(model, CPU, MaskedForward)


def test_check_tree_forward_runs_once_per_setting(monkeypatch):
    calls, original = [], selfcheck._tree_errors

    def spy(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(selfcheck, "_tree_errors", spy)
    model = tiny_model("llama")
    check_tree_forward(model, CPU, MaskedForward)
    check_tree_forward(model, CPU, MaskedForward)
    assert len(calls) == 1
    model.set_attn_implementation("eager")
    check_tree_forward(model, CPU, MaskedForward)
    check_tree_forward(model.to(torch.bfloat16), CPU, MaskedForward)
    check_tree_forward(model.train(), CPU, MaskedForward)
    with torch.autocast("cpu", dtype=torch.float16):
        check_tree_forward(model, CPU, MaskedForward)
    assert len(calls) == 5
    check_tree_forward(tiny_model("llama"), CPU, MaskedForward)
    assert len(calls) == 6


def test_check_tree_forward_leaves_the_global_random_state_alone():
    model, before = tiny_model("llama", attention_dropout=0.5).train(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"token by token.*model\.eval"):
        check_tree_forward(model, CPU, MaskedForward)
    assert torch.equal(torch.get_rng_state(), before)


def test_check_tree_forward_explains_a_forward_that_fails(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(MaskedForward, "masks", lambda *_: {}["the mask"])
    with pytest.raises(ValueError, match=r"model: LlamaForCausalLM cannot run.*the mask.*without tree_budget"):
        check_tree_forward(model, CPU, MaskedForward)


@pytest.mark.parametrize(
    "family, fields, length",
    [
        ("llama", {}, selfcheck.MIN_PREFIX),
        ("mistral", {}, 20),
        ("mistral", {"sliding_window": 300}, selfcheck.MIN_PREFIX),
        ("mistral", {"max_position_embeddings": 20}, 2),
        ("llama", {"max_position_embeddings": 8}, 1),
    ],
)
def test_prefix_length_exceeds_a_short_window_and_stays_within_the_positions(family, fields, length):
    assert selfcheck._prefix_length(tiny_model(family, **fields).config) == length
