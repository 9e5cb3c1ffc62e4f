"""Keeping the accepted path in a key/value cache and dropping the rest of the tree."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

COMPACTABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def check_cache(cache: Cache) -> None:
    """Raise a ValueError if a layer of `cache` cannot keep scattered rows exactly.

    Static layers have no room for a tree, quantised ones lose precision when rows are written back, and recurrent
    states of sibling branches mix.
    """
    if cache.offloading:
        raise ValueError(
            "cache: rows of an offloaded cache move between devices while a tree is committed; use a plain one."
        )
    for layer in cache.layers:
        if type(layer) not in COMPACTABLE_LAYERS:
            raise ValueError(
                f"cache: a layer of type {type(layer).__name__} cannot be compacted after tree verification. Tree "
                "decoding needs a dynamic cache of full or sliding-window attention: drop `cache` and "
                "`cache_implementation`, or call generate without `tree_budget`."
            )


@dataclass
class Committed:
    """`length` counts the tokens in the cache that are final."""

    length: int


@contextmanager
def uncommitted_rows(cache: Cache):
    """Let layers hold more rows than their window between a tree forward and `commit_path`.

    Yields a `Committed` whose length the caller raises after each commit. On leaving, also by an exception in the middle
    of a round, the cache is as plain `generate` leaves it: without rows of a tree that was not committed, and no longer
    recording past rows, which would cost memory in the next prefill.
    """
    sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    recorded = [layer.record_past for layer in sliding]
    cache.activate_past_recording()
    committed = Committed(cache.get_seq_length())
    try:
        yield committed
    finally:
        for layer in cache.layers:
            layer.crop(min(0, committed.length - layer.get_seq_length()))
        for layer, record_past in zip(sliding, recorded):
            layer.record_past = record_past


def commit_path(cache: Cache, path: list[int], n_nodes: int) -> None:
    """Keep the rows `path` of the last `n_nodes` rows of every layer, in this order, and drop the other ones.

    Args:
        cache: the cache after a forward over a tree of `n_nodes` nodes.
        path: node indices, ascending.
        n_nodes: the number of rows the tree added.
    """
    if path != list(range(len(path))):  # otherwise the rows are in place already
        layers = [layer for layer in cache.layers if layer.is_initialized]
        rows_on = {device: torch.tensor(path, device=device) for device in {layer.keys.device for layer in layers}}
        for layer in layers:
            for states in (layer.keys, layer.values):
                nodes = states[..., -n_nodes:, :]
                nodes[..., : len(path), :] = nodes.index_select(-2, rows_on[states.device])
    # also when nothing is dropped: `crop` trims sliding layers back to their window
    cache.crop(len(path) - n_nodes)
