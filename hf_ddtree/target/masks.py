"""The attention mask of a tree: every node sees the valid prefix, its ancestors and itself."""

import functools

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .layer_types import MASKED_LAYER_TYPES

Masks = torch.Tensor | dict[str, torch.Tensor | None]


def tree_attention_mask(
    config: PreTrainedConfig,
    cache: Cache,
    query_depths: torch.Tensor,
    key_depths: torch.Tensor,
    visible: torch.Tensor,
    padding_mask: torch.Tensor | None,
    device: torch.device,
) -> Masks:
    """Return the additive masks of a forward over n nodes, in the form that the model takes.

    The cache holds L committed tokens and then m - n nodes of the same tree from earlier forwards; this forward adds n.
    A query at depth d stands at position L + d. It sees the committed key p if p is valid and L + d - p < window. It
    sees the node key at depth e if `visible` says so and d - e < window: windows are measured along the node's own
    path.

    Args:
        config: the text config. With `layer_types` the model takes a dict of masks by layer type, otherwise one mask.
        cache: the cache before the forward. Its layers say which keys they will return.
        query_depths: `[n]` int64.
        key_depths: `[m]` int64, the depths of all node keys, those of this forward last.
        visible: `[n, m]` bool, the ancestor relation of queries to node keys, self included.
        padding_mask: `[1, L + 1]` or longer, 0 where a committed token is padding. None if there is none.
        device: where the masks are needed.

    Returns:
        A `[1, 1, n, T]` mask of 0 and the dtype's minimum, or a dict of such masks by layer type. The masks are
        additive, because eager attention would add a bool mask as 0 and 1. Their dtype is that of the cached keys.
    """
    dtype = _key_dtype(cache)
    depths = (query_depths.to(device), key_depths.to(device), visible.to(device))

    def mask(layer_idx: int, window: int | None) -> torch.Tensor:
        return _mask(cache, layer_idx, depths, window, padding_mask, dtype, device)

    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(0, layer_window(config, 0))
    return {
        layer_type: mask(_layer_index(cache, layer_type), layer_window(config, layer_types.index(layer_type)))
        if layer_type in MASKED_LAYER_TYPES
        else None  # recurrent layers have a tree form of their own
        for layer_type in set(layer_types)
    }


def no_masks(config: PreTrainedConfig, device: torch.device) -> Masks:
    """Return empty masks in the form that the model takes. They keep the model from building masks of its own."""
    empty = torch.empty(1, 1, 0, 0, dtype=torch.float32, device=device)
    layer_types = getattr(config, "layer_types", None)
    return empty if layer_types is None else dict.fromkeys(layer_types, empty)


def first_valid(mask: torch.Tensor) -> int:
    """Return the index of the first entry of a mask that is not 0, or 0 if there is none.

    Args:
        mask: `[S]` of any dtype, 0 where a token is hidden.
    """
    return int((mask != 0).int().argmax())


def layer_window(config: PreTrainedConfig, layer_idx: int) -> int | None:
    """Return the sliding window of a layer in tokens, or None for full attention.

    Without `layer_types`, a window holds for every layer.

    Args:
        config: the text config.
        layer_idx: the layer's index among the decoder layers.
    """
    layer_types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    return window if layer_types is None or layer_types[layer_idx] == "sliding_attention" else None


def _key_dtype(cache: Cache) -> torch.dtype:
    """Return the dtype of the keys in a cache, with which the queries agree. The model's weights may have others."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    return functools.reduce(torch.promote_types, [layer.keys.dtype for layer in layers])


def _layer_index(cache: Cache, layer_type: str) -> int:
    """Return the first cache layer of a type, or 0: a cache built without a config keeps every layer in full."""
    wanted = layer_type == "sliding_attention"
    kinds = zip(cache.is_sliding, cache.is_linear, strict=True)
    return next((i for i, (sliding, linear) in enumerate(kinds) if not linear and bool(sliding) == wanted), 0)


def _mask(
    cache: Cache,
    layer_idx: int,
    depths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: int | None,
    padding_mask: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    query_depths, key_depths, visible = depths
    n, m = visible.shape
    kv_length, kv_offset = cache.get_mask_sizes(n, layer_idx)
    n_prefix = kv_length - m
    length = kv_offset + n_prefix  # L: the committed tokens
    hidden = torch.finfo(dtype).min
    mask = torch.zeros(n, kv_length, dtype=dtype, device=device)
    tree_visible = visible
    if window is not None:
        prefix_index = torch.arange(kv_offset, length, dtype=torch.long, device=device)
        distance = length + query_depths[:, None] - prefix_index
        mask[:, :n_prefix].masked_fill_(distance >= window, hidden)
        tree_visible = visible & (query_depths[:, None] - key_depths < window)
    if padding_mask is not None:
        mask[:, :n_prefix].masked_fill_(padding_mask[0, kv_offset:length].to(device) == 0, hidden)
    mask[:, n_prefix:].masked_fill_(~tree_visible, hidden)
    return mask[None, None]
