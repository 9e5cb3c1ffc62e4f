"""The attention mask of a tree: every node sees the valid prefix, its ancestors and itself."""

import torch
from transformers import Cache, PreTrainedConfig

MASKED_LAYER_TYPES = ("full_attention", "sliding_attention")
SUPPORTED_ATTENTION = ("eager", "sdpa")


def tree_attention_mask(
    config: PreTrainedConfig,
    cache: Cache,
    query_depths: torch.Tensor,
    key_depths: torch.Tensor,
    visible: torch.Tensor,
    padding_mask: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Build the additive masks of a forward over n nodes, in the form the model takes.

    The cache holds L committed tokens and then m - n nodes of the same tree from earlier forwards; this forward adds n.
    A query at depth d stands at L + d. It sees the committed key p iff p is valid and L + d - p < window, and the node
    key at depth e iff `visible` and d - e < window: windows are measured along the node's own path.

    Args:
        config: the text config. With `layer_types` the model takes a dict of masks by layer type, otherwise one mask.
        cache: the cache before the forward; its layers say which keys they will return.
        query_depths: `[n]` int64.
        key_depths: `[m]` int64, the depths of all node keys, those of this forward last.
        visible: `[n, m]` bool, the ancestor relation of queries to node keys, self included.
        padding_mask: `[1, L + 1]` or longer, 0 where a committed token is padding; None if there is none.
        dtype: the model's dtype (an additive mask must match the queries).
        device: where the masks are needed.

    Returns:
        A `[1, 1, n, T]` mask of 0 and the dtype's minimum, or a dict of such masks by layer type. Additive, because a
        bool mask is added as 0 and 1 by eager attention.
    """
    geometry = {"device": device, "dtype": dtype, "padding_mask": padding_mask}
    depths = (query_depths.to(device), key_depths.to(device), visible.to(device))
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is not None:
        return {
            layer_type: _mask(cache, _layer_index(cache, layer_type), depths, _window(layer_type, window), **geometry)
            if layer_type in MASKED_LAYER_TYPES
            else None  # recurrent layers have a tree form of their own
            for layer_type in set(layer_types)
        }
    # without layer types a window, if there is one, holds for every layer
    return _mask(cache, 0, depths, window, **geometry)


def window_masks(config: PreTrainedConfig, device: torch.device) -> torch.Tensor | dict[str, torch.Tensor]:
    """Empty masks, in the form the model takes, that tell each layer nothing but its window: `[1, 1, 0, window or 0]`.

    For the kernel, which knows the rest. What the layers themselves say about windows differs between families.
    """
    layer_types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if layer_types is not None:
        return {name: torch.empty(1, 1, 0, _window(name, window) or 0, device=device) for name in set(layer_types)}
    return torch.empty(1, 1, 0, window or 0, device=device)


def _window(layer_type: str, window: int | None) -> int | None:
    return window if layer_type == "sliding_attention" else None


def _layer_index(cache: Cache, layer_type: str) -> int:
    """The first cache layer of that type; a cache built without a config keeps every layer in full."""
    wanted = layer_type == "sliding_attention"
    kinds = zip(cache.is_sliding, cache.is_linear)
    return next((i for i, (sliding, linear) in enumerate(kinds) if not linear and bool(sliding) == wanted), 0)


def _mask(cache, layer_idx, depths, window, padding_mask, dtype, device):
    query_depths, key_depths, visible = depths
    n, m = visible.shape
    kv_length, kv_offset = cache.get_mask_sizes(n, layer_idx)
    n_prefix = kv_length - m
    length = kv_offset + n_prefix  # L: the committed tokens
    hidden = torch.finfo(dtype).min
    mask = torch.zeros(n, kv_length, dtype=dtype, device=device)
    tree_visible = visible
    if window is not None:
        prefix_index = torch.arange(kv_offset, length, device=device)
        distance = length + query_depths[:, None] - prefix_index
        mask[:, :n_prefix].masked_fill_(distance >= window, hidden)
        tree_visible = visible & (query_depths[:, None] - key_depths < window)
    if padding_mask is not None:
        mask[:, :n_prefix].masked_fill_(padding_mask[0, kv_offset:length].to(device) == 0, hidden)
    mask[:, n_prefix:].masked_fill_(~tree_visible, hidden)
    return mask[None, None]
