"""The self-check: it passes every supported family and refuses models that it must not pass."""

import functools
import gc
import re
import threading
import weakref
from contextlib import nullcontext

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


@pytest.fixture
def runs(monkeypatch):
    """Return a list that gets an entry whenever a check runs forwards."""
    runs, original = [], selfcheck._measure

    def spy(*args):
        runs.append(args)
        return original(*args)

    monkeypatch.setattr(selfcheck, "_measure", spy)
    return runs


def test_check_tree_forward_runs_once_per_setting(runs):
    model = tiny_model("llama")
    check_tree_forward(model, CPU, MaskedForward)
    check_tree_forward(model, CPU, MaskedForward)
    assert len(runs) == 1
    model.set_attn_implementation("eager")
    check_tree_forward(model, CPU, MaskedForward)
    check_tree_forward(model.to(torch.bfloat16), CPU, MaskedForward)
    check_tree_forward(model.train(), CPU, MaskedForward)
    with torch.autocast("cpu", dtype=torch.float16):
        check_tree_forward(model, CPU, MaskedForward)
    assert len(runs) == 5
    check_tree_forward(tiny_model("llama"), CPU, MaskedForward)
    assert len(runs) == 6


def test_check_tree_forward_remembers_few_states_of_a_model(runs):
    model = tiny_model("llama", num_hidden_layers=2)
    for _ in range(selfcheck.MAX_REMEMBERED + 3):
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        check_tree_forward(model, CPU, MaskedForward)
        handle.remove()
    assert len(runs) == selfcheck.MAX_REMEMBERED + 3
    assert len(selfcheck._passed[model]) == selfcheck.MAX_REMEMBERED


def test_check_tree_forward_keeps_no_model_alive():
    model = tiny_model("llama", num_hidden_layers=2)
    model.register_forward_hook(functools.partial(lambda model, *_: None, model))
    check_tree_forward(model, CPU, MaskedForward)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# family: the fields that give it dropout, and where it is switched on
DROPOUT = {
    "llama": ({"attention_dropout": 0.5}, "model.layers.1.self_attn"),
    "gemma2": ({"attention_dropout": 0.5}, "model.layers.1.self_attn"),
    "gpt2": ({"resid_pdrop": 0.1}, "transformer.h.1.mlp.dropout"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DROPOUT)
def test_check_tree_forward_refuses_dropout_that_is_switched_on_later(family, dtype):
    fields, place = DROPOUT[family]
    model = tiny_model(family, **fields).to(dtype)
    check_tree_forward(model, CPU, MaskedForward)
    model.get_submodule(place).train()
    with pytest.raises(ValueError, match=r"is random: .*model\.eval\(\)"):
        check_tree_forward(model, CPU, MaskedForward)
    check_tree_forward(model.eval(), CPU, MaskedForward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_tree_forward_refuses_a_hook_that_draws_random_numbers(dtype):
    model = tiny_model("llama").to(dtype)
    check_tree_forward(model, CPU, MaskedForward)
    noise = torch.Generator("cpu").manual_seed(0)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * (1 + torch.rand((), generator=noise)))
    with pytest.raises(ValueError, match=r"is random: .*remove the hook"):
        check_tree_forward(model, CPU, MaskedForward)


@pytest.mark.parametrize("training", [False, True])
def test_check_tree_forward_leaves_the_global_random_state_alone(training, monkeypatch):
    model, before, restored = tiny_model("llama", attention_dropout=0.5), torch.get_rng_state(), []
    original = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda state: restored.append(original(state)))
    with pytest.raises(ValueError, match="is random") if training else nullcontext():
        check_tree_forward(model.train(training), CPU, MaskedForward)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(restored) == training, "only dropout makes it necessary"


def test_check_tree_forward_allows_training_mode_without_dropout():
    check_tree_forward(tiny_model("llama").train(), CPU, MaskedForward)


def test_check_tree_forward_does_not_disturb_threads_that_draw():
    """A restored random state would make another thread draw the same numbers twice."""
    model, drawn, stop = tiny_model("llama"), [], threading.Event()

    def draw():
        while not stop.is_set():
            drawn.append(torch.rand(2, dtype=torch.float64))

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    check_tree_forward(model, CPU, MaskedForward)
    stop.set()
    thread.join()
    assert len(drawn) > 100
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn)


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError])
def test_check_tree_forward_raises_errors_of_a_forward_as_they_are(monkeypatch, error):
    raised = error("the mask")

    def masks(*args):
        raise raised

    monkeypatch.setattr(MaskedForward, "masks", masks)
    with pytest.raises(error) as caught:
        check_tree_forward(tiny_model("llama"), CPU, MaskedForward)
    assert caught.value is raised and caught.traceback[-1].name == "masks"
    assert re.search("LlamaForCausalLM over a small tree.*call generate without tree_budget", raised.__notes__[0])


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
