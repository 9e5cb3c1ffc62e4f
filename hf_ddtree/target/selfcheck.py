"""The self-check: on first use, a model's tree forward must equal its own sequential forwards."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .._transformers import attention_implementation, cached_tokens, empty_cache
from ..tree import DraftTree
from .attention import TreeForward, text_config
from .precision import PrecisionRecorder
from .snapshot import Snapshot
from .target import Target

# Siblings, cousins and a scattered path: with a wrong mask or position, most nodes would see wrong keys.
PARENTS = [-1, 0, 0, 0, 1, 2, 3, 5, 5]
SCATTERED_PATH = [0, 2, 5, 8]
MIN_PREFIX = 12
# A longer window is not exceeded, because a prefix beyond it would make the check slow.
MAX_PREFIX = 256

# A correct tree forward differs from sequential forwards by rounding alone. Rounding is measured, and these are floors
# for that measurement, in float32 or better and in low precision.
TOLERANCE_FLOOR = 1e-4
LOW_PRECISION_TOLERANCE_FLOOR = 5e-2
# Two plain ways to run the same text differ by more than this only if the model gives other results token by token than
# over several tokens.
MAX_ROUNDING = 5e-4
MAX_LOW_PRECISION_ROUNDING = 0.2
MAX_REMEMBERED = 8  # states of a model, so that a new hook with every request does not fill the memory

_passed: WeakKeyDictionary = WeakKeyDictionary()  # model -> the newest snapshots with which it passed


@dataclass
class Differences:
    """Relative differences of logits, one per compared node.

    Args:
        low_precision: whether the forwards compute with fewer bits than float32.
        errors: between a tree forward and sequential forwards.
        roundings: between two plain ways to run a text, token by token and all at once.
        noises: between two equal forwards over a text.
    """

    low_precision: bool = False
    errors: list[float] = field(default_factory=list)
    roundings: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)


@torch.no_grad()
def check_tree_forward(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> None:
    """Raise a ValueError unless a tree forward gives every node the logits of its own chain, also after a commit.

    The check compares, on random tokens, each node of a small tree with plain decoding along the node's path. It then
    commits a scattered path and compares again on the compacted cache. The prefix exceeds the model's sliding window if
    the window has at most 256 tokens. The check runs again if something changed that the tree forward depends on, such
    as a hook, a dtype or an attention function. `Snapshot` lists everything. The weights may change.

    Args:
        model: the target.
        device: the device of its inputs. The model itself may be offloaded.
        attention: the attention backend.

    Raises:
        ValueError: if the model is random, if it continues a cached text inconsistently, or if the tree forward
            differs. An exception from a forward is raised as it is, with a note.
    """
    snapshot = Snapshot(model, device, attention)
    if snapshot in _passed.get(model, ()):
        return
    way_out = "pass tree_attention='sdpa'" if attention.name == "triton" else "call generate without tree_budget"
    training = any(module.training for module in model.modules())
    try:
        with _forked_random_state(model, device) if training else nullcontext():
            differences = _measure(model, device, attention)
    except Exception as error:
        error.add_note(
            f"hf_ddtree ran {type(model).__name__} over a small tree, because it checks this model on first use. If "
            f"the model cannot run over a tree, {way_out}."
        )
        raise
    _judge(model, differences, training, way_out)
    _passed[model] = (snapshot, *_passed.get(model, ()))[:MAX_REMEMBERED]


def _judge(model: PreTrainedModel, differences: Differences, training: bool, way_out: str) -> None:
    """Raise a ValueError that names the first problem that the differences show."""
    name, low = type(model).__name__, differences.low_precision
    # in low precision, rounding alone can change the experts of a few nodes, but not of most nodes
    reduce = _median if low else max
    floor = LOW_PRECISION_TOLERANCE_FLOOR if low else TOLERANCE_FLOOR
    rounding, error = reduce(differences.roundings), reduce(differences.errors)
    tolerance = max(floor, 10 * rounding)
    inconsistent = not rounding <= (MAX_LOW_PRECISION_ROUNDING if low else MAX_ROUNDING)
    differs = not error <= tolerance
    noise = (max if training or inconsistent or differs else reduce)(differences.noises)
    # Some kernels of GPUs round differently from call to call. In training mode, dropout explains any difference.
    if not noise <= (0 if training else floor):
        raise ValueError(
            f"model: {name} is random: two equal forwards over the same tokens give other logits ({noise:.2g} "
            "relative), so no text can be repeated. Dropout in training mode or a hook that draws random numbers has "
            "this effect; call model.eval(), or remove the hook."
        )
    if inconsistent:
        raise ValueError(
            f"model: {name} gives other logits token by token than over several tokens ({rounding:.2g} relative), so "
            "no tree forward can equal plain decoding. A hook that changes only the newest position has this "
            "effect: let it change all positions. Otherwise call generate without tree_budget."
        )
    if differs:
        implementation = attention_implementation(text_config(model))
        raise ValueError(
            f"model: {name} with attn_implementation='{implementation}' does not support tree decoding: over a tree of "
            f"{len(PARENTS)} nodes its logits differ from those of forwards along each path by {error:.2g} (relative), "
            f"and rounding explains at most {tolerance:.2g}; {way_out}."
        )


def _forked_random_state(model: PreTrainedModel, device: torch.device) -> AbstractContextManager:
    """Return a context that restores the global random state of the model's devices, from which dropout draws."""
    devices = {device, *(parameter.device for parameter in model.parameters())}
    return torch.random.fork_rng([device for device in devices if device.type not in ("cpu", "meta")])


def _measure(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> Differences:
    """Run two trees after each other and the plain forwards to compare them with."""
    config, n_nodes = text_config(model), len(PARENTS)
    n_prefix = _prefix_length(config)
    generator = torch.Generator("cpu").manual_seed(0)
    n_tokens = n_prefix + 2 * n_nodes
    tokens = torch.randint(config.vocab_size, (n_tokens,), generator=generator, dtype=torch.long, device="cpu")
    prefix, *trees = tokens.to(device).split([n_prefix, n_nodes, n_nodes])

    target = Target.after(model, prefix, attention)
    chain, text = copy.deepcopy(target.cache), prefix  # the same tokens, added one by one
    found, precision = Differences(), PrecisionRecorder()
    with target.decoding():
        for node_ids in trees:
            tree = DraftTree.from_lists(node_ids.tolist(), PARENTS)
            logits = target.verify([tree]).logits[0].to(device, torch.float32)
            expected, chain = _one_by_one(model, node_ids, chain)
            found.errors += _relative_rms(logits, expected)
            target.commit([SCATTERED_PATH])
            text = torch.cat([text, node_ids[SCATTERED_PATH]])
            with precision:
                at_once, again = (_forward(model, text, empty_cache(DynamicCache, config)) for _ in range(2))
            found.roundings += _relative_rms(at_once[-len(SCATTERED_PATH) :], expected[SCATTERED_PATH])
            found.noises += _relative_rms(again, at_once)
    found.low_precision = precision.is_low
    return found


def _prefix_length(config) -> int:
    """Return the length of the prefix: beyond the window if that is not too long, and within the model's positions."""
    layers = empty_cache(DynamicCache, config).layers
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
    positions = torch.arange(start, start + len(tokens), dtype=torch.long, device=tokens.device)
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
