"""Keeping the accepted path in a key/value cache and dropping the rest of the tree."""

import copy
from collections.abc import Iterator
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

from .._transformers import cached_tokens, crop_rows, past_recording

# A dummy layer has no rows. It stands for a layer without a state, or for one that shares the keys of another layer.
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
RECURRENT_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


@dataclass
class Committed:
    """How many tokens of the cache are final.

    Args:
        length: their number. It grows with each commit.
    """

    length: int


def is_recurrent(layer) -> bool:
    """Return whether a cache layer holds a recurrent state. Dropping rows does not undo a change of that state."""
    return isinstance(layer, RECURRENT_LAYERS)


@contextmanager
def uncommitted_rows(cache: Cache) -> Iterator[Committed]:
    """Let layers hold more rows than they need between a tree forward and `commit_path`.

    Yields the number of committed tokens, which the caller increases after each commit. When the context ends, also by
    an exception in the middle of a round, the cache is as plain `generate` leaves it. It has no rows of an uncommitted
    tree, also not in memory. It no longer records past rows, because that would cost memory in the next prefill.

    Args:
        cache: the cache after the prefill.
    """
    committed = Committed(cached_tokens(cache))
    with past_recording(cache):
        try:
            yield committed
        finally:
            for layer in cache.layers:
                crop_rows(layer, _surplus(layer, committed.length))
                _release_dropped_rows(layer)


def _surplus(layer, length: int) -> int:
    """Return the number of rows in a layer beyond the `length` committed tokens."""
    if isinstance(layer, DummyLayer):
        return 0
    if isinstance(layer, LinearAttentionLayer):  # it keeps as many rows as its convolution sees
        return layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
    return max(0, layer.get_seq_length() - length)


def _release_dropped_rows(layer) -> None:
    """Copy what a layer holds out of larger tensors: dropping rows leaves views, which keep all rows in memory."""
    if isinstance(layer, LinearAttentionLayer):
        for index, states in layer.conv_states.items():
            layer.conv_states[index] = own_storage(states)
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        layer.keys, layer.values = own_storage(layer.keys), own_storage(layer.values)


def own_storage(states: torch.Tensor) -> torch.Tensor:
    """Return a tensor that keeps no memory beyond its own entries: itself, or a copy if it is a part of a larger one.

    Args:
        states: any tensor.
    """
    return states if states.untyped_storage().nbytes() <= states.nbytes else states.clone()


def copy_cache(cache: Cache) -> Cache:
    """Return a copy of a cache that shares no memory and no graph with it.

    A cache that was filled while gradients were on holds results in a graph, which deepcopy refuses.

    Args:
        cache: the cache.
    """
    copies = {id(states): states.detach().clone() for layer in cache.layers for states in _state_tensors(layer)}
    return copy.deepcopy(cache, copies)


def _state_tensors(layer) -> list[torch.Tensor]:
    """Return what a layer holds of the tokens: keys and values, inputs of convolutions, and recurrent states."""
    states = [layer.keys, layer.values] if isinstance(layer, DynamicLayer) and layer.is_initialized else []
    if isinstance(layer, LinearAttentionLayer):
        states += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [tensor for tensor in states if tensor is not None]  # a layer may have only one of both kinds of state


def commit_path(cache: Cache, path: list[int], n_nodes: int) -> None:
    """Keep the rows `path` of the last `n_nodes` rows of every layer, in this order, and drop the others.

    Args:
        cache: the cache after a forward over a tree of `n_nodes` nodes.
        path: node indices, ascending.
        n_nodes: the number of rows that the tree added.
    """
    if path != list(range(len(path))):  # otherwise the rows are in place already
        tensors = [states for layer in cache.layers for states in _row_tensors(layer)]
        devices = {states.device for states in tensors}
        rows_on = {device: torch.tensor(path, dtype=torch.long, device=device) for device in devices}
        for states in tensors:
            nodes = states[..., -n_nodes:, :]
            nodes[..., : len(path), :] = nodes.index_select(-2, rows_on[states.device])
    # called even if nothing is dropped, because this trims sliding layers back to their window
    for layer in cache.layers:
        crop_rows(layer, n_nodes - len(path))


def _row_tensors(layer) -> list[torch.Tensor]:
    """Return views of what a layer holds per token, each `[.., tokens, channels]`."""
    if isinstance(layer, LinearAttentionLayer):
        return [states.mT for states in layer.conv_states.values()]
    return [layer.keys, layer.values] if layer.is_initialized and not isinstance(layer, DummyLayer) else []
