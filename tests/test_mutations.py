"""Proof that the checks can fail: the self-check and the comparison both catch classic faults, put in on purpose."""

import sys

import pytest
import torch
from helpers import random_ids

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.target import attention, masks, tree_verifier
from hf_ddtree.target.cache import commit_path
from hf_ddtree.target.masks import tree_attention_mask
from hf_ddtree.testing import ScriptedDrafter, tiny_model


def causal_instead_of_ancestors(monkeypatch, model):
    monkeypatch.setattr(DraftTree, "ancestor_mask", property(lambda tree: torch.ones(len(tree), len(tree)).tril() > 0))


def siblings_see_each_other(monkeypatch, model):
    original = DraftTree.ancestor_mask.func

    def leaky(tree):
        return original(tree) | (tree.parents[:, None] == tree.parents)

    monkeypatch.setattr(DraftTree, "ancestor_mask", property(leaky))


def positions_by_index(monkeypatch, model):
    prepare = type(model).prepare_inputs_for_generation

    def flattened(self, input_ids, **kwargs):
        if isinstance(kwargs.get("attention_mask"), (dict, torch.Tensor)):
            positions = kwargs["position_ids"]
            kwargs["position_ids"] = positions[:, :1] + torch.arange(positions.shape[1])
        return prepare(self, input_ids, **kwargs)

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", flattened)


def window_by_index(monkeypatch, model):
    def flattened(config, cache, query_depths, key_depths, *args, **kwargs):
        return tree_attention_mask(config, cache, torch.arange(len(query_depths)), key_depths, *args, **kwargs)

    monkeypatch.setattr(attention, "tree_attention_mask", flattened)


def no_window(monkeypatch, model):
    monkeypatch.setattr(masks, "layer_window", lambda config, layer_idx: None)


def bool_mask(monkeypatch, model):
    def as_bool(*args, **kwargs):
        additive = tree_attention_mask(*args, **kwargs)
        return {name: mask == 0 for name, mask in additive.items()} if isinstance(additive, dict) else additive == 0

    monkeypatch.setattr(attention, "tree_attention_mask", as_bool)


def use_commit(monkeypatch, commit):
    monkeypatch.setattr(tree_verifier, "commit_path", commit)


def first_rows_instead_of_path(monkeypatch, model):
    use_commit(monkeypatch, lambda cache, path, n: commit_path(cache, list(range(len(path))), n))


def one_row_too_many(monkeypatch, model):
    use_commit(monkeypatch, lambda cache, path, n: commit_path(cache, [*path, *[n - 1] * (len(path) < n)], n))


def keys_without_values(monkeypatch, model):
    def commit(cache, path, n):
        values = [layer.values.clone() for layer in cache.layers]
        commit_path(cache, path, n)
        for layer, value in zip(cache.layers, values, strict=True):
            start = value.shape[-2] - n
            layer.values = value[..., : start + len(path), :][..., -layer.keys.shape[-2] :, :]

    use_commit(monkeypatch, commit)


FAULTS = [
    (causal_instead_of_ancestors, "llama"),
    (causal_instead_of_ancestors, "gpt2"),
    (causal_instead_of_ancestors, "deepseek_v3"),
    (siblings_see_each_other, "qwen3"),
    (positions_by_index, "llama"),
    (positions_by_index, "gpt2"),
    (positions_by_index, "gemma3_text"),
    (window_by_index, "mistral"),
    (window_by_index, "gpt_oss"),
    (no_window, "gemma3_text"),
    (no_window, "qwen3_windowed"),
    (bool_mask, "gemma2"),
    (first_rows_instead_of_path, "llama"),
    (first_rows_instead_of_path, "mistral"),
    (one_row_too_many, "llama"),
    (keys_without_values, "llama"),
]
IDS = [f"{fault.__name__}-{family}" for fault, family in FAULTS]


def outputs_differ(model) -> bool:
    """Return whether tree decoding differs from plain decoding, in the output or by failing."""
    prompt = random_ids(24, seed=1)
    plain = model.generate(prompt, max_new_tokens=40, do_sample=False)
    for seed in range(3):
        drafter = ScriptedDrafter(plain[0].tolist(), seed=seed)
        try:
            tree = model.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter, tree_budget=24)
        except RuntimeError:
            return True
        if not torch.equal(plain, tree):
            return True
    return False


@pytest.mark.parametrize("fault, family", FAULTS, ids=IDS)
def test_comparison_with_plain_generate_catches(fault, family, monkeypatch):
    model = hf_ddtree.enable(tiny_model(family))
    # the module, because the function of this name hides it
    monkeypatch.setattr(sys.modules["hf_ddtree.enable"], "check_tree_forward", lambda *args: None)
    assert not outputs_differ(model)
    fault(monkeypatch, model)
    assert outputs_differ(model)


@pytest.mark.parametrize("fault, family", FAULTS, ids=IDS)
def test_check_tree_forward_catches(fault, family, monkeypatch):
    model = hf_ddtree.enable(tiny_model(family))
    fault(monkeypatch, model)
    with pytest.raises(ValueError, match=f"model: {type(model).__name__}"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget=4)
