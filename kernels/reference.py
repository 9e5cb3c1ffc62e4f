"""Tree attention in plain PyTorch: the formula that the Triton kernel computes."""

import torch


def tree_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ancestors: torch.Tensor,
    depths: torch.Tensor,
    prefix_lengths: torch.Tensor,
    scale: float,
    first_valid: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v for the nodes of a tree, each of which sees the prefix, its ancestors and itself.

    With P the length of a row's prefix, key j < P is a committed token and key P + i is node i. Node n sees

        j < P   iff  j >= first_valid  and  P + depth(n) - j < window,
        P + i   iff  i is n or an ancestor of n  and  depth(n) - depth(i) < window.

    Scores s become softcap * tanh(s / softcap); a sink adds exp(sink) to the denominator of its head. A node that sees
    nothing gets zeros.

    Args:
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, T, D]` with T >= P + N in each row. Keys beyond P + N are not read. Hq is a multiple of Hkv.
        value: `[B, Hkv, T, Dv]`.
        ancestors: `[B, N, ceil(N / 64)]` int64, bit i % 64 of word i // 64 for node i, from `pack_ancestors`.
        depths: `[B, N]` int32.
        prefix_lengths: `[B]` int32, P.
        scale: the factor of the scores.
        first_valid: `[B]` int32, the number of left-padding keys. None for no padding.
        window: the sliding window of the layer in tokens, None for full attention.
        softcap: the soft cap of the scores, or None.
        sinks: `[Hq]`, the sink of each head, or None.

    Returns:
        `[B, Hq, N, Dv]` in the dtype of `query`. It is computed in fp32, or in fp64 for fp64 inputs.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    n_batch, n_heads, n_nodes, _ = query.shape
    key, value = (states.to(dtype).repeat_interleave(n_heads // key.shape[1], dim=1) for states in (key, value))
    scores = scale * query.to(dtype) @ key.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible_keys(ancestors, depths, prefix_lengths, key.shape[2], first_valid, window)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        extra = sinks.to(dtype)[None, :, None, None].expand(n_batch, -1, n_nodes, 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num(0.0)[..., : key.shape[2]]
    # keys that no node sees may hold anything, also NaN
    value = value.masked_fill(hidden.all(dim=1)[:, None, :, None], 0.0)
    return (weights @ value).to(query.dtype)


def visible_keys(ancestors, depths, prefix_lengths, n_keys: int, first_valid=None, window=None) -> torch.Tensor:
    """Return which node sees which key, `[B, N, n_keys]` bool. The arguments are those of the formula above."""
    n_batch, n_nodes = depths.shape
    index = torch.arange(n_keys, dtype=torch.long, device=depths.device)
    node = index - prefix_lengths[:, None]  # [B, T], negative in the prefix
    is_node = (node >= 0) & (node < n_nodes)
    safe = node.clamp(0, n_nodes - 1)
    rows = torch.arange(n_batch, dtype=torch.long, device=depths.device)[:, None]
    words = ancestors.gather(2, (safe // 64)[:, None].expand(-1, n_nodes, -1))
    related = (words >> (safe % 64)[:, None]) & 1 == 1
    distance = depths[:, :, None] - torch.where(is_node, depths[rows, safe], node)[:, None]
    in_prefix = (node < 0) & (index >= (0 if first_valid is None else first_valid[:, None]))
    visible = in_prefix[:, None] | (is_node[:, None] & related)
    return visible if window is None else visible & (distance < window)


def pack_ancestors(ancestor_mask: torch.Tensor) -> torch.Tensor:
    """Return the ancestor relation as bits, `[B, N, ceil(N / 64)]` int64.

    Args:
        ancestor_mask: `[B, N, N]` bool, self included.
    """
    n_nodes = ancestor_mask.shape[-1]
    bits = torch.nn.functional.pad(ancestor_mask, (0, -n_nodes % 64)).unflatten(-1, (-1, 64)).long()
    return (bits << torch.arange(64, dtype=torch.long, device=bits.device)).sum(-1)
