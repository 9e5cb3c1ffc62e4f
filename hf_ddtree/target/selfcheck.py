"""The self-check: on first use, a model's tree forward must equal its own sequential forwards."""

import copy
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .._transformers import attention_implementation, cached_tokens
from ..tree import DraftTree
from .attention import TreeForward, text_config
from .target import Target

# Siblings, cousins and a scattered path: with a wrong mask or position, most nodes would see wrong keys.
PARENTS = [-1, 0, 0, 0, 1, 2, 3, 5, 5]
SCATTERED_PATH = [0, 2, 5, 8]
MIN_PREFIX = 12
# A longer window is not exceeded, because a prefix beyond it would make the check slow.
MAX_PREFIX = 256

# A correct tree forward differs from sequential forwards by rounding alone. Rounding is measured, and these are floors
# for that measurement.
TOLERANCE_FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4}
LOW_PRECISION_TOLERANCE_FLOOR = 5e-2
# Two plain ways to run the same text differ by more than this for two reasons only. Either the model draws random
# numbers, or it gives other results token by token than over several tokens.
MAX_ROUNDING = {torch.float64: 1e-4, torch.float32: 5e-4}
MAX_LOW_PRECISION_ROUNDING = 0.2

_passed: WeakKeyDictionary = WeakKeyDictionary()  # model -> the settings under which it passed


@torch.no_grad()
def check_tree_forward(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> None:
    """Raise a ValueError unless a tree forward gives every node the logits of its own chain, also after a commit.

    The check compares, on random tokens, each node of a small tree with plain decoding along the node's path. It then
    commits a scattered path and compares again on the compacted cache. The prefix exceeds the model's sliding window if
    the window has at most 256 tokens. The check runs once per model, dtype (the model's or autocast's), attention
    implementation, attention backend and training mode.

    Args:
        model: the target.
        device: the device of its inputs. The model itself may be offloaded.
        attention: the attention backend.

    Raises:
        ValueError: if the logits differ, or if a tree forward fails.
    """
    implementation = attention_implementation(text_config(model))
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else model.dtype
    settings = (implementation, dtype, model.training, attention.name)
    if settings in _passed.setdefault(model, set()):
        return
    name = type(model).__name__
    way_out = "pass tree_attention='sdpa'" if attention.name == "triton" else "call generate without tree_budget"
    try:
        with torch.random.fork_rng():  # dropout would draw from the global generators
            errors, roundings = _tree_errors(model, device, attention)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as failure:
        raise ValueError(f"model: {name} cannot run a forward over a tree ({failure}); {way_out}.") from failure
    # in low precision, rounding alone can change the experts of a few nodes, but not of most nodes
    reduce = max if dtype in TOLERANCE_FLOOR else _median
    error, rounding = reduce(errors), reduce(roundings)
    if not rounding <= MAX_ROUNDING.get(dtype, MAX_LOW_PRECISION_ROUNDING):
        raise ValueError(
            f"model: {name} gives other logits token by token than over several tokens ({rounding:.2g} relative), so "
            "no tree forward can equal plain decoding. If it has dropout and is in training mode, call model.eval()."
        )
    tolerance = max(TOLERANCE_FLOOR.get(dtype, LOW_PRECISION_TOLERANCE_FLOOR), 10 * rounding)
    if not error <= tolerance:
        raise ValueError(
            f"model: {name} with attn_implementation={implementation!r} does not support tree decoding: over a tree of "
            f"{len(PARENTS)} nodes its logits differ from those of forwards along each path by {error:.2g} (relative), "
            f"and rounding explains at most {tolerance:.2g}; {way_out}."
        )
    _passed[model].add(settings)


def _tree_errors(
    model: PreTrainedModel, device: torch.device, attention: type[TreeForward]
) -> tuple[list[float], list[float]]:
    """Return, per node, the relative difference of tree and path logits, and that of two plain ways to run the path."""
    config, n_nodes = text_config(model), len(PARENTS)
    n_prefix = _prefix_length(config)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (n_prefix + 2 * n_nodes,), generator=generator).to(device)
    prefix, *trees = tokens.split([n_prefix, n_nodes, n_nodes])

    target = Target.after(model, prefix, attention)
    chain, text = copy.deepcopy(target.cache), prefix  # the same tokens, added one by one
    errors, roundings = [], []
    with target.decoding():
        for node_ids in trees:
            tree = DraftTree.from_lists(node_ids.tolist(), PARENTS)
            logits = target.verify([tree]).logits[0].to(device, torch.float32)
            expected, chain = _one_by_one(model, node_ids, chain)
            errors += _relative_rms(logits, expected)
            target.commit([SCATTERED_PATH])
            # rounding is the difference between token by token and all at once without a cache
            text = torch.cat([text, node_ids[SCATTERED_PATH]])
            at_once = _forward(model, text, DynamicCache(config=config))[-len(SCATTERED_PATH) :]
            roundings += _relative_rms(at_once, expected[SCATTERED_PATH])
    return errors, roundings


def _prefix_length(config) -> int:
    """Return the length of the prefix: beyond the window if that is not too long, and within the model's positions."""
    layers = DynamicCache(config=config).layers
    windows = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    wanted = max([MIN_PREFIX, *(window + 4 for window in windows if window <= MAX_PREFIX)])
    longest = getattr(config, "max_position_embeddings", None) or wanted + 2 * len(PARENTS)
    # beyond the length where longrope changes its frequencies, token by token and all at once are not the same
    rope = getattr(config, "rope_parameters", None) or {}
    longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return max(1, min(wanted, longest - 2 * len(PARENTS)))


def _one_by_one(
    model: PreTrainedModel, node_ids: torch.Tensor, chain: DynamicCache
) -> tuple[torch.Tensor, DynamicCache]:
    """Return every node's logits by plain decoding along its path, and the cache after the scattered path."""
    caches, logits = {-1: chain}, []
    for node, parent in enumerate(PARENTS):
        caches[node] = copy.deepcopy(caches[parent])
        logits.append(_forward(model, node_ids[[node]], caches[node]))
    return torch.cat(logits), caches[SCATTERED_PATH[-1]]


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the logits `[n, V]` of a plain causal forward, which extends the cache."""
    start = cached_tokens(cache)
    positions = torch.arange(start, start + len(tokens), device=tokens.device)
    outputs = model(input_ids=tokens[None], position_ids=positions[None], cache=cache, use_cache=True)
    return outputs.logits[0].to(tokens.device, torch.float32)


def _relative_rms(logits: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return, per row, the root mean square difference relative to the spread of the expected logits.

    Entries that are not finite, such as a masked part of the vocabulary, must be the same ones.
    """
    finite = expected.isfinite()
    if not torch.equal(finite, logits.isfinite()):
        return [float("inf")] * len(expected)
    difference = torch.where(finite, logits - expected, 0).pow(2).mean(-1).sqrt()
    spread = torch.stack([row[mask].std() for row, mask in zip(expected, finite, strict=True)])
    return (difference / spread.clamp(min=1e-12)).tolist()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
