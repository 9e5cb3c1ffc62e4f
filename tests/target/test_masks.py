"""The tree mask, cell by cell, against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache

from hf_ddtree import DraftTree
from hf_ddtree.target.cache import uncommitted_rows
from hf_ddtree.target.masks import layer_window, no_masks, tree_attention_mask

HIDDEN = torch.finfo(torch.float32).min


def filled_cache(config, length: int, dtype: torch.dtype = torch.float32) -> DynamicCache:
    """Return a cache after a prefill of `length` tokens, with one float per key."""
    cache = DynamicCache(config=config)
    keys = torch.arange(length, dtype=dtype)[None, None, :, None]
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)
    return cache


def visible(length, window, tree, padding, node, key) -> bool:
    """Return whether `node` sees the key at index `key` of prefix and nodes, by the definition."""
    depth = int(tree.depths[node])
    if key < length:
        in_window = window is None or length + depth - key < window
        return in_window and key >= padding
    ancestor = key - length
    in_window = window is None or depth - int(tree.depths[ancestor]) < window
    return in_window and bool(tree.ancestor_mask[node, ancestor])


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 20),
    window=st.integers(2, 12),
    padding=st.integers(0, 4),
    parents=st.lists(st.integers(0, 100), max_size=12),
    config_window=st.booleans(),
)
def test_tree_attention_mask_equals_the_definition_in_every_cell(length, window, padding, parents, config_window):
    tree = DraftTree.from_lists(list(range(len(parents) + 1)), [-1, *(p % (i + 1) for i, p in enumerate(parents))])
    config = AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=window)
    cache = filled_cache(config, length) if config_window else DynamicCache()
    if not config_window:  # a cache built without a config keeps all rows of every layer
        keys = torch.zeros(1, 1, length, 1)
        for layer in range(2):
            cache.update(keys, keys, layer)
    padding = min(padding, length - 1)
    padding_mask = (torch.arange(length + 1) >= padding)[None] if padding else None
    with uncommitted_rows(cache):
        masks = tree_attention_mask(config, cache, tree.depths, tree.depths, tree.ancestor_mask, padding_mask, "cpu")
        for layer_type, mask in masks.items():
            layer = 0 if layer_type == "sliding_attention" else 1
            keys = torch.zeros(1, 1, len(tree), 1)
            kept, _ = cache.update(keys, keys, layer)
            assert mask.shape == (1, 1, len(tree), kept.shape[-2]), "the mask must fit the keys the layer returns"
            offset = length + len(tree) - kept.shape[-2]
            own_window = window if layer_type == "sliding_attention" else None
            for node in range(len(tree)):
                for column in range(kept.shape[-2]):
                    expected = visible(length, own_window, tree, padding, node, offset + column)
                    assert mask[0, 0, node, column] == (0 if expected else HIDDEN), (layer_type, node, column)
                # what the layer has dropped must not have been visible
                assert not any(visible(length, own_window, tree, padding, node, key) for key in range(offset))


@pytest.mark.parametrize("model_type, window", [("llama", None), ("mistral", 8)])
def test_tree_attention_mask_is_one_mask_without_layer_types(model_type, window):
    config = AutoConfig.for_model(model_type, num_hidden_layers=1)
    if window:
        config.sliding_window = window
    tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    cache = filled_cache(config, 20)
    mask = tree_attention_mask(config, cache, tree.depths, tree.depths, tree.ancestor_mask, None, "cpu")
    assert int((mask[0, 0, 1] == 0).sum()) == (20 + 2 if window is None else window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tree_attention_mask_has_the_dtype_of_the_keys(dtype):
    config = AutoConfig.for_model("gemma2", num_hidden_layers=2)
    tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    cache = filled_cache(config, 5, dtype)
    masks = tree_attention_mask(config, cache, tree.depths, tree.depths, tree.ancestor_mask, None, "cpu")
    assert {(mask.dtype, float(mask.min())) for mask in masks.values()} == {(dtype, torch.finfo(dtype).min)}


LAYER_TYPES = {"llama": None, "gemma2": {"sliding_attention", "full_attention"}}


@pytest.mark.parametrize("model_type, layer_types", LAYER_TYPES.items())
def test_no_masks_are_empty_and_in_the_form_that_the_model_takes(model_type, layer_types):
    masks = no_masks(AutoConfig.for_model(model_type, num_hidden_layers=2), torch.device("cpu"))
    assert (set(masks) if isinstance(masks, dict) else None) == layer_types
    assert all(mask.shape == (1, 1, 0, 0) for mask in (masks.values() if isinstance(masks, dict) else [masks]))


@pytest.mark.parametrize(
    "model_type, fields, windows",
    [
        ("llama", {}, [None, None]),
        ("mistral", {"sliding_window": 8}, [8, 8]),
        ("gemma2", {"sliding_window": 8}, [8, None]),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8]),
    ],
)
def test_layer_window_is_that_of_the_layer(model_type, fields, windows):
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **fields)
    assert [layer_window(config, layer) for layer in range(2)] == windows
