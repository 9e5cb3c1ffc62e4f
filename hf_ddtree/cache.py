"""Keeping the accepted path in a key/value cache and dropping the rest of the tree."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
RECURRENT_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def is_recurrent(layer) -> bool:
    """Whether a layer of a cache holds a state that no dropping of rows takes back."""
    return isinstance(layer, RECURRENT_LAYERS)


def check_cache(cache: Cache) -> None:
    """Raise a ValueError if a layer of `cache` can neither keep scattered rows exactly nor be branched.

    Static layers have no room for a tree, and quantised ones lose precision when rows are written back.
    """
    if cache.offloading:
        raise ValueError(
            "cache: rows of an offloaded cache move between devices while a tree is committed; use a plain one."
        )
    recurrent = any(map(is_recurrent, cache.layers))
    supported = (*ATTENTION_LAYERS, *RECURRENT_LAYERS, DummyLayer) if recurrent else ATTENTION_LAYERS
    for layer in cache.layers:
        if type(layer) not in supported:
            raise ValueError(
                f"cache: a layer of type {type(layer).__name__} cannot be compacted after tree verification. Tree "
                "decoding needs a dynamic cache: drop `cache` and `cache_implementation`, or call generate without "
                "`tree_budget`."
            )
    if recurrent and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError(
            "cache: all layers are recurrent, so it cannot tell how many tokens it holds; call generate without "
            "`tree_budget`."
        )


@dataclass
class Committed:
    """`length` counts the tokens in the cache that are final."""

    length: int


@contextmanager
def uncommitted_rows(cache: Cache):
    """Let layers hold more rows than they need between a tree forward and `commit_path`.

    Yields a `Committed` whose length the caller raises after each commit. On leaving, also by an exception in the middle
    of a round, the cache is as plain `generate` leaves it: without rows of a tree that was not committed, and no longer
    recording past rows, which would cost memory in the next prefill.
    """
    recording = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionLayer)]
    recorded = [layer.record_past for layer in recording]
    cache.activate_past_recording()
    committed = Committed(cache.get_seq_length())
    try:
        yield committed
    finally:
        for layer in cache.layers:
            layer.crop(-_surplus(layer, committed.length))
        for layer, record_past in zip(recording, recorded):
            layer.record_past = record_past


def _surplus(layer, length: int) -> int:
    """The number of rows in a layer beyond the `length` committed tokens."""
    if isinstance(layer, LinearAttentionLayer):  # keeps as many as its convolution sees
        return layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
    return max(0, layer.get_seq_length() - length)


def commit_path(cache: Cache, path: list[int], n_nodes: int) -> None:
    """Keep the rows `path` of the last `n_nodes` rows of every layer, in this order, and drop the other ones.

    Args:
        cache: the cache after a forward over a tree of `n_nodes` nodes.
        path: node indices, ascending.
        n_nodes: the number of rows the tree added.
    """
    if path != list(range(len(path))):  # otherwise the rows are in place already
        tensors = [states for layer in cache.layers for states in _row_tensors(layer)]
        rows_on = {device: torch.tensor(path, device=device) for device in {states.device for states in tensors}}
        for states in tensors:
            nodes = states[..., -n_nodes:, :]
            nodes[..., : len(path), :] = nodes.index_select(-2, rows_on[states.device])
    # also when nothing is dropped: `crop` trims sliding layers back to their window
    cache.crop(len(path) - n_nodes)


def _row_tensors(layer) -> list[torch.Tensor]:
    """Views of what a layer holds per token, `[.., tokens, channels]`."""
    if isinstance(layer, LinearAttentionLayer):
        return [states.mT for states in layer.conv_states.values()]
    return [layer.keys, layer.values] if layer.is_initialized else []
