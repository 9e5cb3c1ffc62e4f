"""Which changes of a model a snapshot sees, and which it ignores."""

import copy
import gc
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch
from helpers import random_ids
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ddtree
from hf_ddtree.benchmark.stages import forward_times
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.gated_delta import gated_delta_patches
from hf_ddtree.target.kernel_attention import KernelForward
from hf_ddtree.target.patching import patched
from hf_ddtree.target.snapshot import Snapshot
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

CPU = torch.device("cpu")
PLACES = ["", "model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp.act_fn", "lm_head"]


def snapshot(model, attention=MaskedForward) -> Snapshot:
    return Snapshot(model, CPU, attention)


def own_function(*args, **kwargs):
    raise AssertionError("it is not called")


@pytest.fixture
def model():
    return tiny_model("llama", num_hidden_layers=2)


REGISTER = {
    "hook": lambda module: module.register_forward_hook(own_function),
    "hook with kwargs": lambda module: module.register_forward_hook(own_function, with_kwargs=True),
    "pre-hook": lambda module: module.register_forward_pre_hook(own_function),
    "pre-hook with kwargs": lambda module: module.register_forward_pre_hook(own_function, with_kwargs=True),
}


@pytest.mark.parametrize("place", PLACES)
def test_snapshot_sees_every_kind_of_hook_and_its_removal(model, place):
    before, module = snapshot(model), model.get_submodule(place)
    assert snapshot(model) == before
    assert snapshot_with(REGISTER["hook"], model, module) != snapshot_with(REGISTER["pre-hook"], model, module)
    for register in REGISTER.values():
        assert snapshot_with(register, model, module) != before
        assert snapshot(model) == before


def snapshot_with(register, model, module) -> Snapshot:
    """Return a snapshot under a hook, and remove the hook."""
    handle = register(module)
    try:
        return snapshot(model)
    finally:
        handle.remove()


def test_snapshot_sees_on_which_module_a_hook_is(model):
    first, second = (snapshot_with(REGISTER["hook"], model, layer) for layer in model.model.layers)
    assert first != second


def test_snapshot_sees_a_hook_on_all_modules(model):
    before = snapshot(model)
    handle = torch.nn.modules.module.register_module_forward_hook(own_function)
    try:
        assert snapshot(model) != before
    finally:
        handle.remove()
    assert snapshot(model) == before


@pytest.mark.parametrize("place", PLACES)
def test_snapshot_sees_a_forward_that_was_replaced(model, place, monkeypatch):
    before, module = snapshot(model), model.get_submodule(place)
    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", own_function)
        assert snapshot(model) != before
    vars(module).pop("forward", None)  # monkeypatch leaves the function of the class on the instance
    assert snapshot(model) == before
    monkeypatch.setattr(type(module), "forward", own_function)
    assert snapshot(model) != before


CHANGES = {
    "training mode of a submodule": lambda model: model.model.layers[1].self_attn.train(),
    "dtype of one parameter": lambda model: model.model.norm.bfloat16(),
    "dtype of a buffer": lambda model: model.model.rotary_emb.double(),
    "a new module": lambda model: model.model.layers[0].add_module("adapter", torch.nn.Identity()),
    "an equal module": lambda model: setattr(model.model, "norm", copy.deepcopy(model.model.norm)),
    "the attention implementation": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_snapshot_sees_a_change_of_the_modules(model, change):
    before = snapshot(model)
    CHANGES[change](model)
    assert snapshot(model) != before


@torch.no_grad()
def test_snapshot_ignores_the_values_of_the_weights(model):
    before = snapshot(model)
    model.lm_head.weight.mul_(2)
    model.load_state_dict(tiny_model("llama", seed=1, num_hidden_layers=2).state_dict())
    assert snapshot(model) == before


def test_snapshot_sees_autocast_and_the_backend(model):
    before = snapshot(model)
    assert snapshot(model, KernelForward) != before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_bf16 = snapshot(model)
    with torch.autocast("cpu", dtype=torch.float16):
        assert snapshot(model) != in_bf16 != before


def test_snapshot_sees_functions_that_were_registered(model, monkeypatch):
    before = snapshot(model)
    for interface, original in ((AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, sdpa_mask)):
        interface.register("sdpa", own_function)
        try:
            assert snapshot(model) != before
        finally:
            interface.register("sdpa", original)
        assert snapshot(model) == before
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own_function
    try:
        assert snapshot(model) != before
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "family, name",
    [
        ("gemma2", "eager_attention_forward"),
        ("gpt_oss", "eager_attention_forward"),
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("qwen3_next", "causal_conv1d_fn"),
    ],
)
def test_snapshot_sees_functions_that_were_replaced_in_the_file_of_the_layers(family, name, monkeypatch):
    model = tiny_model(family)
    before = snapshot(model)
    monkeypatch.setattr(sys.modules[type(model).__module__], name, own_function)
    assert snapshot(model) != before


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_snapshot_ignores_tree_forwards_in_other_threads(family):
    model = tiny_model(family)
    before = snapshot(model)
    with patched([*KernelForward.patches(model), *gated_delta_patches(model)]):
        assert snapshot(model) == before


def test_snapshot_ignores_hooks_that_record():
    """Those of transformers stay on the model, and those of the prefill may belong to another thread."""
    model, in_prefill = hf_ddtree.enable(tiny_model("llama")), []

    def look(module, args, output):
        if model._forward_hooks:  # that of the prefill
            in_prefill.append(snapshot(model))

    model.model.register_forward_hook(look)
    before = snapshot(model)
    drafter = tiny_dflash_drafter(model)
    model.generate(random_ids(8), max_new_tokens=3, tree_budget=4, assistant_model=drafter)
    assert in_prefill == [before]
    with forward_times(model, [model.lm_head]):
        assert snapshot(model) == before
    assert any(layer._forward_hooks for layer in model.model.layers), "transformers has registered its hooks"
    assert snapshot(model) == before


def test_snapshot_compares_hooks_by_identity(model):
    """Two equal hooks may behave differently, and comparing tensors would raise an error."""

    @dataclass
    class Steering:
        vector: torch.Tensor

        def __call__(self, module, args, output):
            return output

    taken = []
    for _ in range(2):
        handle = model.model.layers[0].register_forward_hook(Steering(torch.ones(3)))
        taken.append(snapshot(model))
        assert snapshot(model) == taken[-1]
        handle.remove()
    assert taken[0] != taken[1]


def test_snapshot_takes_no_new_function_at_an_old_address_for_the_old_one(model):
    taken = []
    for _ in range(20):
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        taken.append(snapshot(model))
        handle.remove()
        del handle
    assert not any(first == second for i, first in enumerate(taken) for second in taken[:i])


def test_snapshot_keeps_neither_model_nor_hook_alive():
    model = tiny_model("llama", num_hidden_layers=2)

    def hook(module, args, output, model=model):
        return output

    model.register_forward_hook(hook)
    model.model.forward = model.model.forward  # a bound method, as accelerate leaves it
    taken, alive = snapshot(model), [weakref.ref(model), weakref.ref(hook)]
    assert taken == snapshot(model)
    del model, hook
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_snapshot_takes_hooks_that_cannot_be_referenced_weakly(model):
    class Slotted:
        __slots__ = ()

        def __call__(self, module, args, output):
            return output

    before = snapshot(model)
    model.register_forward_hook(Slotted())
    assert snapshot(model) == snapshot(model) != before
