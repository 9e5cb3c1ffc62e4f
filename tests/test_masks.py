"""The tree mask, cell by cell, against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache

from hf_ddtree import DraftTree
from hf_ddtree.masks import tree_attention_mask
from hf_ddtree.cache import uncommitted_rows

HIDDEN = torch.finfo(torch.float32).min


def filled_cache(config, length: int) -> DynamicCache:
    """A cache after a prefill of `length` tokens, one float per key."""
    cache = DynamicCache(config=config)
    keys = torch.arange(length, dtype=torch.float32)[None, None, :, None]
    for layer in range(config.num_hidden_layers):
        cache.update(keys, keys, layer)
    return cache


def visible(length, window, tree, padding, node, key) -> bool:
    """May `node` see the key at index `key` of prefix and nodes, by the definition."""
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
def test_every_cell_of_both_layer_types(length, window, padding, parents, config_window):
    tree = DraftTree.from_lists(list(range(len(parents) + 1)), [-1] + [p % (i + 1) for i, p in enumerate(parents)])
    config = AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=window)
    cache = filled_cache(config, length) if config_window else DynamicCache()
    if not config_window:  # a cache built without a config keeps all rows of every layer
        keys = torch.zeros(1, 1, length, 1)
        for layer in range(2):
            cache.update(keys, keys, layer)
    padding = min(padding, length - 1)
    padding_mask = (torch.arange(length + 1) >= padding)[None] if padding else None
    with uncommitted_rows(cache):
        masks = tree_attention_mask(
            config, cache, tree.depths, tree.depths, tree.ancestor_mask, padding_mask, torch.float32, "cpu"
        )
        for layer_type, mask in masks.items():
            layer = 0 if layer_type == "sliding_attention" else 1
            keys = torch.zeros(1, 1, len(tree), 1)
            kept, _ = cache.update(keys, keys, layer)
            assert mask.shape == (1, 1, len(tree), kept.shape[-2]), "the mask must fit the keys the layer returns"
            offset = length + len(tree) - kept.shape[-2]
            layer_window = window if layer_type == "sliding_attention" else None
            for node in range(len(tree)):
                for column in range(kept.shape[-2]):
                    expected = visible(length, layer_window, tree, padding, node, offset + column)
                    assert mask[0, 0, node, column] == (0 if expected else HIDDEN), (layer_type, node, column)
                # what the layer has dropped must not have been visible
                assert not any(visible(length, layer_window, tree, padding, node, key) for key in range(offset))


@pytest.mark.parametrize("model_type, window", [("llama", None), ("mistral", 8)])
def test_families_without_layer_types_take_one_mask(model_type, window):
    config = AutoConfig.for_model(model_type, num_hidden_layers=1)
    if window:
        config.sliding_window = window
    tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    mask = tree_attention_mask(
        config, filled_cache(config, 20), tree.depths, tree.depths, tree.ancestor_mask, None, torch.bfloat16, "cpu"
    )
    assert mask.dtype == torch.bfloat16
    assert int((mask[0, 0, 1] == 0).sum()) == (20 + 2 if window is None else window)
