"""Clocks for functions that run on a device: time per call, memory per call, and the bandwidth of a copy."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

N_WARM_UP = 3  # calls before those that count

Name = TypeVar("Name", bound=Hashable)


def median_milliseconds(
    functions: Mapping[Name, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[Name, float]:
    """Return the median milliseconds per call of each function. The functions take turns.

    Args:
        functions: the functions by name.
        device: where they run.
        repeats: the calls of each function that count.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(N_WARM_UP + repeats):
        for name, function in functions.items():
            seconds[name].append(seconds_per_call(function, device))
    return {name: 1e3 * statistics.median(values[N_WARM_UP:]) for name, values in seconds.items()}


def seconds_per_call(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call. On a GPU, CUDA events measure them.

    Args:
        function: the function.
        device: where it runs.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def allocated_megabytes(function: Callable[[], Any]) -> float:
    """Return the largest amount of GPU memory that one call allocates, in MiB.

    Args:
        function: a function that runs on the current GPU.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Return the gigabytes per second that a copy of 1 GiB reads and writes.

    Args:
        device: where to copy.
        repeats: the copies that count.
    """
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    milliseconds = median_milliseconds({"copy": lambda: copy.copy_(source)}, device, repeats)["copy"]
    return 2 * source.numel() / milliseconds / 1e6
