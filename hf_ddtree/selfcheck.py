"""The check behind the promise: on first use, a model's tree forward must equal its own sequential forwards."""

import copy
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .tree import DraftTree
from .verify import tree_verifier

# Siblings, cousins and a scattered path: with a wrong mask or position most nodes see what they should not.
PARENTS = [-1, 0, 0, 0, 1, 2, 3, 5, 5]
SCATTERED_PATH = [0, 2, 5, 8]
# beyond this a prefix past the window would make the check slow
LONGEST_PREFIX = 256
# A model whose tree is right differs by rounding alone, which is measured; these are floors for that measurement.
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4}
LOW_PRECISION_FLOOR = 5e-2

# Two plain ways to run the same text differ by more only if something random is in between, or if the model computes
# something else token by token than at once.
LARGEST_ROUNDING = {torch.float64: 1e-4, torch.float32: 5e-4}
LARGEST_LOW_PRECISION_ROUNDING = 0.2
SHORTEST_PREFIX = 12

_passed: WeakKeyDictionary = WeakKeyDictionary()  # model -> the settings under which it passed


@torch.no_grad()
def check_tree_attention(model: PreTrainedModel, device: torch.device, use_kernel: bool) -> None:
    """Raise a ValueError unless a tree forward gives every node the logits of its own chain, also after a commit.

    Compares, on random tokens: each node of a small tree with plain decoding, token by token, along the node's path; then,
    after a scattered path was committed, the same again on the compacted cache. The prefix exceeds the model's sliding window
    where the window is at most 256. Runs once per model, dtype (its own or autocast's), attention implementation, kernel
    and mode.

    Args:
        model: the target.
        device: where its inputs are; the model itself may be offloaded.
        use_kernel: whether the Triton kernel attends.
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else model.dtype
    settings = (implementation, dtype, model.training, use_kernel)
    if settings in _passed.setdefault(model, set()):
        return
    way_out = 'pass tree_attention="sdpa"' if use_kernel else "call generate without tree_budget"
    try:
        with torch.random.fork_rng():  # dropout would draw from the global generators
            errors, roundings = _tree_errors(model, device, use_kernel)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as failure:
        raise ValueError(
            f"model: {type(model).__name__} cannot run a forward over a tree ({failure}); {way_out}."
        ) from failure
    # in low precision a MoE router can flip on rounding alone, but not at most nodes
    reduce = max if dtype in FLOOR else _median
    error, rounding = reduce(errors), reduce(roundings)
    if not rounding <= LARGEST_ROUNDING.get(dtype, LARGEST_LOW_PRECISION_ROUNDING):
        raise ValueError(
            f"model: {type(model).__name__} gives other logits token by token than at once ({rounding:.2g} relative), so "
            "no tree forward can equal plain decoding; for dropout in training mode call model.eval()."
        )
    tolerance = max(FLOOR.get(dtype, LOW_PRECISION_FLOOR), 10 * rounding)
    if not error <= tolerance:
        raise ValueError(
            f"model: {type(model).__name__} with attn_implementation={implementation!r} does not support tree decoding: "
            f"over a tree of {len(PARENTS)} nodes its logits differ from those of forwards along each path by "
            f"{error:.2g} (relative; rounding explains {tolerance:.2g}); {way_out}."
        )
    _passed[model].add(settings)


def _tree_errors(model: PreTrainedModel, device: torch.device, use_kernel: bool) -> tuple[list[float], list[float]]:
    """Per node, the relative difference of tree and path logits, and that of two plain ways to run the same path."""
    config = model.config.get_text_config(decoder=True)
    n_nodes, cache = len(PARENTS), DynamicCache(config=config)
    n_prefix = _prefix_length(config, cache)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (n_prefix + 2 * n_nodes,), generator=generator).to(device)
    prefix, *trees = tokens.split([n_prefix, n_nodes, n_nodes])

    _forward(model, prefix, cache)
    chain, text = copy.deepcopy(cache), prefix  # the same tokens, added one by one
    errors, roundings = [], []
    with tree_verifier(model, cache, use_kernel) as verifier:
        for node_ids in trees:
            logits = _tree_logits(verifier, DraftTree.from_lists(node_ids.tolist(), PARENTS), cache, device)
            expected, chain = _one_by_one(model, node_ids, chain)
            errors += _relative_rms(logits, expected)
            verifier.commit_path(SCATTERED_PATH)
            # rounding is what lies between this and all at once, without any cache
            text = torch.cat([text, node_ids[SCATTERED_PATH]])
            at_once = _forward(model, text, DynamicCache(config=config))[-len(SCATTERED_PATH) :]
            roundings += _relative_rms(at_once, expected[SCATTERED_PATH])
    return errors, roundings


def _prefix_length(config, cache: DynamicCache) -> int:
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    wanted = max([SHORTEST_PREFIX, *(window + 4 for window in windows if window <= LONGEST_PREFIX)])
    longest = getattr(config, "max_position_embeddings", None) or wanted + 2 * len(PARENTS)
    # where longrope changes its frequencies, token by token and at once are not the same
    longest = min(longest, (getattr(config, "rope_parameters", None) or {}).get("original_max_position_embeddings") or longest)
    return max(1, min(wanted, longest - 2 * len(PARENTS)))


def _one_by_one(model, node_ids: torch.Tensor, chain: DynamicCache) -> tuple[torch.Tensor, DynamicCache]:
    """Every node's logits as plain decoding along its path computes them, and the cache after the scattered path."""
    caches, logits = {-1: chain}, []
    for node, parent in enumerate(PARENTS):
        caches[node] = copy.deepcopy(caches[parent])
        logits.append(_forward(model, node_ids[[node]], caches[node]))
    return torch.cat(logits), caches[SCATTERED_PATH[-1]]


def _forward(model, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits `[n, V]` of a causal forward; extends the cache."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + len(tokens), device=tokens.device)
    outputs = model(input_ids=tokens[None], position_ids=positions[None], cache=cache, use_cache=True)
    return outputs.logits[0].to(tokens.device, torch.float32)


def _tree_logits(verifier, tree: DraftTree, cache: DynamicCache, device: torch.device) -> torch.Tensor:
    positions = torch.tensor([[cache.get_seq_length()]], device=device)
    inputs = {"cache": cache, "attention_mask": None, "position_ids": positions, "use_cache": True}
    return verifier.verify_tree(tree, inputs).logits[0].to(device, torch.float32)


def _relative_rms(logits: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Per row, the rms difference in units of the spread of the expected logits over the vocabulary.

    Entries that are not finite, such as a masked part of the vocabulary, must be the same ones.
    """
    finite = expected.isfinite()
    if not torch.equal(finite, logits.isfinite()):
        return [float("inf")] * len(expected)
    difference = torch.where(finite, logits - expected, 0).pow(2).mean(-1).sqrt()
    spread = torch.stack([row[mask].std() for row, mask in zip(expected, finite)])
    return (difference / spread.clamp(min=1e-12)).tolist()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
