"""The state of a training run on disk, without pickle: tensors in safetensors, everything else in its metadata."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..files import write_then_rename
from .config import TrainConfig
from .data import Sequence

FREE_SETTINGS = ("output", "features", "evaluate_every")  # a resumed run may change them: they do not affect the result


@dataclass
class Progress:
    """How far a run has come. All values can be written as JSON.

    Args:
        settings: what must not change when the run is resumed: the result of `run_settings`.
        step: the number of finished optimizer steps.
        best: the best held-out tokens per round so far.
        seconds: training time, over all parts of a resumed run.
        log: one entry per checkpoint.
    """

    settings: dict[str, str]
    step: int = 0
    best: float = 0.0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def run_settings(config: TrainConfig, sequences: list[Sequence]) -> dict[str, str]:
    """Return the settings that a resumed run must share with the run that it continues.

    Args:
        config: all its settings except `FREE_SETTINGS` are included.
        sequences: all data. A hash of their tokens is included.
    """
    tokens = torch.cat([sequence.tokens for sequence in sequences])
    settings = {**asdict(config), "data": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}
    return {name: str(value) for name, value in settings.items() if name not in FREE_SETTINGS}


def check_same_run(path: Path, settings: dict[str, str]) -> None:
    """Check that a checkpoint was written by a run with the same settings.

    Args:
        path: the checkpoint.
        settings: the result of `run_settings`.

    Raises:
        ValueError: if a setting differs. The message names the settings.
    """
    saved = read_progress(path).settings
    changed = [name for name in settings if saved.get(name) != settings[name]]
    if changed:
        raise ValueError(
            f"{path} was written by a run with other settings ({', '.join(changed)}), so this run cannot continue it. "
            "Choose the same settings, or another --output to start a new run."
        )


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write weights, optimizer state and progress into one file, which appears complete or not at all.

    Args:
        path: the file. An existing one is replaced.
        model: the network that is trained.
        optimizers: in the order in which `load_checkpoint` will get them.
        progress: how far the run has come.
    """
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optimizer.{i}.{parameter}.{name}"] = value.contiguous()
    metadata = {"progress": json.dumps(asdict(progress))}
    write_then_rename(path, lambda unfinished: save_file(tensors, unfinished, metadata))


def read_progress(path: Path) -> Progress:
    """Read only the progress of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return Progress(**json.loads(file.metadata()["progress"]))


def load_checkpoint(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore what `save_checkpoint` wrote.

    Args:
        path: the checkpoint.
        model: gets the weights.
        optimizers: get their states.

    Returns:
        The progress of the run.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
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
