"""Training state on disk, without pickle: tensors in safetensors, numbers in its metadata."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def save_checkpoint(path: Path, model: torch.nn.Module, optimizers: list, progress: dict) -> None:
    """Write weights, optimizer state and progress into one file that appears complete or not at all.

    Args:
        progress: JSON-serialisable, e.g. the number of steps done and the best figure so far.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optimizer.{i}.{parameter}.{name}"] = torch.as_tensor(value)
    unfinished = path.with_suffix(".unfinished")
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, unfinished, {"progress": json.dumps(progress)}
    )
    unfinished.replace(path)


def read_progress(path: Path) -> dict:
    """The progress in a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["progress"])


def load_checkpoint(path: Path, model: torch.nn.Module, optimizers: list) -> dict:
    """Restore what `save_checkpoint` wrote; returns the progress."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    model.load_state_dict(weights)
    for i, optimizer in enumerate(optimizers):
        full = optimizer.state_dict()
        for name, value in tensors.items():
            kind, *rest = name.split(".", 3)
            if kind == "optimizer" and int(rest[0]) == i:
                full["state"].setdefault(int(rest[1]), {})[rest[2]] = value
        optimizer.load_state_dict(full)
    return read_progress(path)
