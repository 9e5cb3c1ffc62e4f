"""What verifying n nodes costs on this machine: measured once, convex by construction, kept in the cache directory."""

import hashlib
import json
import logging
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from .tree import DraftTree
from .user_cache import user_cache
from .verify import tree_verifier

SIZES = (1, 3, 5, 9, 17, 33, 65, 129, 257, 513)  # nodes, the root included
LENGTHS = (64, 1024)  # committed tokens
LONGEST_CALL = 2.0  # seconds; where so many nodes take longer, or too much memory, larger trees are extrapolated
REPEATS, PATIENCE = 5, 0.3  # calls per size, fewer if they take more seconds than that
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyCost:
    """C_verify(n, L): convex and never falling in n, linear in L between and beyond two measured lengths.

    Args:
        sizes: numbers of nodes, the root included, ascending.
        lengths: the two lengths.
        measured: `[2][len(sizes)]`, seconds.

    Raises:
        ValueError: if these do not fit together.
    """

    sizes: list[int]
    lengths: list[int]
    measured: list[list[float]]

    def __post_init__(self):
        values = np.array(self.measured, dtype=float)
        if values.shape != (2, len(self.sizes)) or len(self.sizes) < 2 or len(self.lengths) != 2:
            raise ValueError("a cost has two lengths, two sizes at least, and a value for each of both")
        if not (np.isfinite(values).all() and (values > 0).all() and (np.diff(self.sizes) > 0).all()):
            raise ValueError("costs are positive numbers, for ascending sizes")

    def seconds(self, n_nodes, length: int) -> np.ndarray:
        """Seconds of a forward over `n_nodes` (an integer or an array) after `length` committed tokens."""
        short, long = (_evaluate(self.sizes, row, n_nodes) for row in self._convex)
        share = (length - self.lengths[0]) / max(1, self.lengths[1] - self.lengths[0])
        # a longer text never costs less; what was measured otherwise is noise
        return short + max(share, 0.0) * np.maximum(long - short, 0.0)

    @cached_property
    def _convex(self) -> list[list[float]]:
        return [convex_below(self.sizes, row) for row in self.measured]


def convex_below(sizes: list[int], seconds: list[float]) -> list[float]:
    """The largest convex, non-decreasing function below some points, at these points: their lower convex hull.

    Taking the running minimum from the right first makes it non-decreasing.
    """
    seconds = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1 and _slope(sizes, seconds, hull[-2], hull[-1]) >= _slope(sizes, seconds, hull[-1], i):
            hull.pop()
        hull.append(i)
    return np.interp(sizes, [sizes[i] for i in hull], [seconds[i] for i in hull]).tolist()


def _slope(sizes, seconds, i: int, j: int) -> float:
    return (seconds[j] - seconds[i]) / (sizes[j] - sizes[i])


def _evaluate(sizes: list[int], seconds: list[float], n_nodes) -> np.ndarray:
    """Linear between the points; beyond the last one it goes on as between the last two."""
    n_nodes = np.asarray(n_nodes)
    beyond = np.maximum(n_nodes - sizes[-1], 0) * _slope(sizes, seconds, -2, -1)
    return np.interp(n_nodes, sizes, seconds) + beyond


def verify_cost(model: PreTrainedModel, device: torch.device, use_kernel: bool) -> VerifyCost:
    """C_verify of this model on this machine, from the cache directory or measured now.

    Args:
        model: the target.
        device: where its inputs are.
        use_kernel: whether the Triton kernel attends.
    """
    try:
        path = user_cache() / "verify-cost" / f"{_fingerprint(model, device, use_kernel)}.json"
        return VerifyCost(**json.loads(path.read_text(encoding="utf-8")))
    except RuntimeError:  # there is no home directory
        path = None
    except (OSError, ValueError, TypeError):
        pass  # not there, or unreadable: measured anew
    logger.warning("Measuring what verifying trees costs on this machine, once.")
    cost = measure(model, device, use_kernel)
    if path is None:
        return cost
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(cost)), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        logger.warning("It cannot be kept for the next time: %s", error)
    return cost


def _fingerprint(model: PreTrainedModel, device: torch.device, use_kernel: bool) -> str:
    """A name for everything the cost depends on."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    parts = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "kernel": use_kernel,
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, transformers.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def cpu_name() -> str:
    """What this machine says of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@torch.no_grad()
def measure(model: PreTrainedModel, device: torch.device, use_kernel: bool) -> VerifyCost:
    """Median seconds of verifying trees of `SIZES` after random texts of `LENGTHS`."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS) + max(SIZES)
    lengths = [max(1, min(LENGTHS[0], longest // 8)), max(1, min(LENGTHS[1], longest // 2))]
    sizes = list(SIZES[: max(2, sum(n + lengths[1] <= longest for n in SIZES))])
    keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        cache = DynamicCache(config=config)
        tokens = torch.randint(config.vocab_size, (1, length), generator=generator).to(device)
        positions = torch.arange(length, device=device)[None]
        model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True, **keep)
        inputs = {"cache": cache, "attention_mask": None, "position_ids": positions[:, -1:] + 1, "use_cache": True}
        with tree_verifier(model, cache, use_kernel) as verifier:
            row = []
            for n_nodes in sizes:
                try:
                    row.append(_median_seconds(verifier, n_nodes, inputs, device))
                except torch.OutOfMemoryError:
                    if len(row) < 2:
                        raise
                    break
                if row[-1] > LONGEST_CALL and len(row) > 1:
                    break
        rows.append(row)
        sizes = sizes[: len(row)]
    return VerifyCost(sizes, lengths, [row[: len(sizes)] for row in rows])


def _median_seconds(verifier, n_nodes: int, inputs: dict, device: torch.device) -> float:
    """Of verifying a tree whose nodes have two children each; only roots stay in the cache."""
    parents = [-1, *((node - 1) // 2 for node in range(1, n_nodes))]
    seconds: list[float] = []
    while len(seconds) <= REPEATS and (len(seconds) < 2 or sum(seconds) < PATIENCE):
        start = time.perf_counter()
        verifier.verify_tree(DraftTree.from_lists([0] * n_nodes, parents), inputs)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
        verifier.commit_path([0])
    return statistics.median(seconds[1:])  # the first call allocates
