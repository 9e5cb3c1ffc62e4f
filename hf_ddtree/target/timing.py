"""Measuring the time of verifying n nodes on this machine, and the name under which it can be stored."""

import hashlib
import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from .._transformers import attention_implementation
from ..tree import DraftTree
from .attention import TreeForward, text_config
from .target import Target

SIZES = (1, 3, 5, 9, 17, 33, 65, 129, 257, 513)  # nodes, the root included
LENGTHS = (64, 1024)  # committed tokens
MAX_SECONDS = 2.0  # of one verification. Larger trees are not timed if one takes longer or too much memory.
MAX_REPEATS, PATIENCE = 5, 0.3  # verifications per size, and the seconds after which there are fewer


@dataclass(frozen=True)
class VerifyTimes:
    """Measured seconds of verifying trees.

    Args:
        sizes: numbers of nodes, the root included, ascending.
        lengths: numbers of committed tokens.
        seconds: `[len(lengths)][len(sizes)]`, medians.
    """

    sizes: list[int]
    lengths: list[int]
    seconds: list[list[float]]


def now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work.

    Args:
        device: the device to wait for.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def time_verification(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> VerifyTimes:
    """Measure the median seconds of verifying trees of `SIZES` nodes after random texts of `LENGTHS` tokens.

    Args:
        model: the target.
        device: the device of its inputs.
        attention: the attention backend.
    """
    config = text_config(model)
    longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS) + max(SIZES)
    lengths = [max(1, min(LENGTHS[0], longest // 8)), max(1, min(LENGTHS[1], longest // 2))]
    sizes = list(SIZES[: max(2, sum(n + lengths[1] <= longest for n in SIZES))])
    generator = torch.Generator("cpu").manual_seed(0)
    rows = []
    for length in lengths:
        tokens = torch.randint(config.vocab_size, (length,), generator=generator, dtype=torch.long, device="cpu")
        rows.append(_time_sizes(Target.after(model, tokens.to(device), attention), sizes))
        sizes = sizes[: len(rows[-1])]
    return VerifyTimes(sizes, lengths, [row[: len(sizes)] for row in rows])


def _time_sizes(target: Target, sizes: list[int]) -> list[float]:
    """Return the median seconds per size, up to the first size that takes too long or too much memory."""
    seconds: list[float] = []
    with target.decoding():
        for n_nodes in sizes:
            try:
                seconds.append(_median_seconds(target, n_nodes))
            except torch.OutOfMemoryError:
                if len(seconds) < 2:
                    raise
                break
            if seconds[-1] > MAX_SECONDS and len(seconds) > 1:
                break
    return seconds


def _median_seconds(target: Target, n_nodes: int) -> float:
    """Time a tree whose nodes have two children each. Only its root stays in the cache."""
    parents = [-1, *((node - 1) // 2 for node in range(1, n_nodes))]
    positions = target.model_kwargs["position_ids"]
    seconds: list[float] = []
    while len(seconds) <= MAX_REPEATS and (len(seconds) < 2 or sum(seconds) < PATIENCE):
        start = time.perf_counter()
        target.verify([DraftTree.from_lists([0] * n_nodes, parents)])
        seconds.append(now(target.device) - start)
        target.commit([[0]])
        # The next tree stands at the same positions, because a model with learned positions may have no further ones.
        target.model_kwargs["position_ids"] = positions
    return statistics.median(seconds[1:])  # the first call allocates memory


def fingerprint(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> str:
    """Return a name for everything that the time of a verification depends on.

    Args:
        model: the target.
        device: the device of its inputs.
        attention: the attention backend.
    """
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    parts = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "attention": [attention_implementation(text_config(model)), attention.name],
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, transformers.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def cpu_name() -> str:
    """Return the name that this machine gives its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
