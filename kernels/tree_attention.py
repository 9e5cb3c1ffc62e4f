"""Tree attention in Triton: the prefix is read once for all nodes and query heads of a KV group, and no mask is built.

This is flash-decoding over a tree. The query heads of a KV group and the nodes are packed into rows,
m = (head in group) N + node, so each key is loaded once for all of them. The keys of the prefix are split over
programs. One more program per row block takes the keys of the tree, whose visibility is one bit each. Each program
writes its unnormalised sum, maximum and denominator, and a second kernel merges them by log-sum-exp.

Sources: FlashAttention-2 (arXiv 2307.08691) for the online softmax, flash-decoding for the split, and DeFT
(arXiv 2404.00242) for sharing the prefix between branches.
"""

import torch
import triton
import triton.language as tl

BLOCK_N = 64  # keys at a time: one word of ancestor bits
MAX_SPLITS = 64
MIN_SPLIT = 256  # keys per program, at least
SHARED_MEMORY = 96 * 1024  # bytes per program, a little less than sm_86 and sm_89 have


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    s = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        x = s / softcap
        square = tl.minimum(x * x, 0.01)
        series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * 17.0 / 315)))
        decay = tl.exp(-2.0 * tl.abs(x))
        large = (1.0 - decay) / (1.0 + decay)
        # near zero, 1 - exp(-2|x|) has few correct digits
        s = softcap * tl.where(x * x < 0.01, series, tl.where(x < 0, -large, large))
    return s


@triton.jit
def _accumulate(s, v, acc, maximum, total):
    """Add one more block of scores to the online softmax. Hidden scores are minus infinity."""
    new_maximum = tl.maximum(maximum, tl.max(s, axis=1))
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen no key yet
    weights = tl.exp(s - safe[:, None])
    correction = tl.exp(maximum - safe)
    acc = acc * correction[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_maximum, total * correction + tl.sum(weights, axis=1)


@triton.jit
def _tree_attention(
    q_ptr, k_ptr, v_ptr, ancestors_ptr, depths_ptr, prefix_ptr, first_ptr, acc_ptr, stats_ptr,
    q_stride_b, q_stride_h, q_stride_n, q_stride_d,
    k_stride_b, k_stride_h, k_stride_t, k_stride_d,
    v_stride_b, v_stride_h, v_stride_t, v_stride_d,
    scale, softcap, window,
    n_nodes, n_words, n_rows, n_kv_heads, n_splits, split_size,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    block, split, batch_head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = batch_head // n_kv_heads, batch_head % n_kv_heads
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_valid = rows < n_rows
    nodes = rows % n_nodes
    dims, dims_v, lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)

    q_heads = head * GROUP + rows // n_nodes
    q_rows = q_ptr + batch * q_stride_b + q_heads.to(tl.int64) * q_stride_h + nodes.to(tl.int64) * q_stride_n
    q = tl.load(q_rows[:, None] + dims[None, :] * q_stride_d, mask=row_valid[:, None] & (dims < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    k_base = k_ptr + batch * k_stride_b + head * k_stride_h
    v_base = v_ptr + batch * v_stride_b + head * v_stride_h
    prefix = tl.load(prefix_ptr + batch)
    depths = tl.load(depths_ptr + batch * n_nodes + nodes, mask=row_valid, other=0)

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    # The last program takes the keys of the tree, and the others take their part of the prefix.
    is_tree = split == n_splits
    first = tl.load(first_ptr + batch) if HAS_FIRST else 0
    start = tl.where(is_tree, 0, split * split_size)
    end = tl.where(is_tree, n_nodes, tl.minimum(prefix, start + split_size))
    offset = tl.where(is_tree, prefix, 0)
    for block_start in range(start, end, BLOCK_N):
        keys = block_start + lanes
        key_valid = keys < end
        # 64 bits for the start of the block and 32 within it, because pointers of a whole tile would fill the registers
        position = (offset + block_start).to(tl.int64)
        k = tl.load(
            k_base + position * k_stride_t + (lanes[None, :] * k_stride_t + dims[:, None] * k_stride_d),
            mask=key_valid[None, :] & (dims < D)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_base + position * v_stride_t + (lanes[:, None] * v_stride_t + dims_v[None, :] * v_stride_d),
            mask=key_valid[:, None] & (dims_v < DV)[None, :],
            other=0.0,
        )
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        s = _scores(q, k, scale, softcap, HAS_SOFTCAP)
        visible = row_valid[:, None] & key_valid[None, :]
        if is_tree:
            words = tl.load(
                ancestors_ptr + (batch * n_nodes + nodes) * n_words + block_start // 64, mask=row_valid, other=0
            )
            visible = visible & (((words[:, None] >> (keys % 64)[None, :].to(tl.int64)) & 1) == 1)
            key_depths = tl.load(depths_ptr + batch * n_nodes + keys, mask=key_valid, other=0)
        else:
            visible = visible & (keys >= first)[None, :]
            key_depths = keys - prefix
        if HAS_WINDOW:
            visible = visible & (depths[:, None] - key_depths[None, :] < window)
        acc, maximum, total = _accumulate(tl.where(visible, s, float("-inf")), v, acc, maximum, total)

    out = (batch_head * (n_splits + 1) + split) * n_rows + rows
    tl.store(acc_ptr + out[:, None] * DV + dims_v[None, :], acc, mask=row_valid[:, None] & (dims_v < DV)[None, :])
    tl.store(stats_ptr + out * 2, maximum, mask=row_valid)
    tl.store(stats_ptr + out * 2 + 1, total, mask=row_valid)


@triton.jit
def _merge(
    acc_ptr, stats_ptr, sinks_ptr, out_ptr,
    out_stride_b, out_stride_h, out_stride_n, out_stride_d,
    n_nodes, n_rows, n_kv_heads, n_parts,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, batch_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = batch_head // n_kv_heads, batch_head % n_kv_heads
    q_head = head * GROUP + row // n_nodes
    dims, parts = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_PARTS)
    index = (batch_head * n_parts + parts) * n_rows + row
    maxima = tl.load(stats_ptr + index * 2, mask=parts < n_parts, other=float("-inf"))
    totals = tl.load(stats_ptr + index * 2 + 1, mask=parts < n_parts, other=0.0)
    maximum = tl.max(maxima, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32)
        maximum = tl.maximum(maximum, sink)
    safe = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp(maxima - safe)
    total = tl.sum(totals * weights, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - safe)
    acc = tl.load(
        acc_ptr + index[:, None] * DV + dims[None, :],
        mask=(parts < n_parts)[:, None] & (dims < DV)[None, :],
        other=0.0,
    )
    result = tl.sum(acc * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    node = row % n_nodes
    out = out_ptr + batch * out_stride_b + q_head.to(tl.int64) * out_stride_h + node.to(tl.int64) * out_stride_n
    tl.store(out + dims * out_stride_d, result.to(out_ptr.dtype.element_ty), mask=dims < DV)


def tree_attention(
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

    `tree_attention_reference` has the formula and describes the arguments. Sums are taken in fp32. `query`, `key` and
    `value` are fp32, bf16 or fp16 and may have any strides, because they are usually views of a cache.
    """
    n_batch, n_heads, n_nodes, head_dim = query.shape
    n_kv_heads, n_keys, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    group = n_heads // n_kv_heads
    n_rows = group * n_nodes
    options = launch_options(n_rows, head_dim, value_dim, query.element_size())
    n_splits = max(1, min(MAX_SPLITS, triton.cdiv(n_keys - n_nodes, MIN_SPLIT)))
    # whole blocks, so that no program reads a key of its neighbour
    split_size = BLOCK_N * max(1, triton.cdiv(n_keys - n_nodes, BLOCK_N * n_splits))
    acc = query.new_empty(n_batch * n_kv_heads, n_splits + 1, n_rows, value_dim, dtype=torch.float32)
    stats = query.new_empty(n_batch * n_kv_heads, n_splits + 1, n_rows, 2, dtype=torch.float32)
    output = query.new_empty(n_batch, n_heads, n_nodes, value_dim)
    with torch.cuda.device_of(query):  # where Triton launches
        _tree_attention[(triton.cdiv(n_rows, options["BLOCK_M"]), n_splits + 1, n_batch * n_kv_heads)](
            query, key, value, ancestors, depths, prefix_lengths, first_valid, acc, stats,
            *query.stride(), *key.stride(), *value.stride(),
            scale, softcap or 0.0, window or 0,
            n_nodes, ancestors.shape[-1], n_rows, n_kv_heads, n_splits, split_size,
            GROUP=group, D=head_dim, DV=value_dim, BLOCK_N=BLOCK_N,
            HAS_FIRST=first_valid is not None, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            # the interpreter multiplies the bits of bf16 numbers as if they were integers
            UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
            **options,
        )  # fmt: skip
        _merge[(n_rows, n_batch * n_kv_heads)](
            acc, stats, sinks, output, *output.stride(), n_nodes, n_rows, n_kv_heads, n_splits + 1,
            GROUP=group, DV=value_dim, BLOCK_DV=options["BLOCK_DV"], BLOCK_PARTS=triton.next_power_of_2(n_splits + 1),
            HAS_SINKS=sinks is not None,
        )  # fmt: skip
    return output


def launch_options(n_rows: int, head_dim: int, value_dim: int, element_size: int) -> dict[str, int]:
    """Return the block sizes, warps and pipeline stages of `_tree_attention`.

    They take as many rows at a time as the registers hold, and as many stages as fit into the shared memory of a small
    card.

    Args:
        n_rows: rows per KV head.
        head_dim: the width of queries and keys.
        value_dim: the width of values.
        element_size: bytes per number.
    """
    block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    wide = element_size > 2 or max(block_d, block_dv) > 128
    most_rows = 16 if element_size > 2 else 32 if wide else 64  # fp32 runs without tensor cores
    block_m = min(most_rows, max(16, triton.next_power_of_2(n_rows)))
    keys_and_values = BLOCK_N * (block_d + block_dv) * element_size
    queries_and_weights = block_m * (block_d + BLOCK_N) * element_size
    num_stages = max(1, min(2 if element_size > 2 else 3, (SHARED_MEMORY - queries_and_weights) // keys_and_values))
    return {
        "BLOCK_M": block_m,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "num_warps": 8 if wide else 4,
        "num_stages": num_stages,
    }
