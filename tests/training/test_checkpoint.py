"""Checkpoints: what comes back, the format on disk, and which run a checkpoint belongs to."""

import dataclasses
import json

import pytest
import torch
from helpers import random_ids
from safetensors.torch import save_file

from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.checkpoint import (
    Progress,
    check_same_run,
    load_checkpoint,
    read_progress,
    run_settings,
    save_checkpoint,
)
from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.data import Sequence
from hf_ddtree.training.optimizers import make_optimizers


def take_step(drafter, optimizers, seed: int) -> None:
    """One optimizer step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def test_load_checkpoint_restores_weights_optimizers_and_progress(tmp_path):
    target = tiny_model("llama")
    drafter, other = tiny_dflash_drafter(target), tiny_dflash_drafter(target, seed=1)
    optimizers, other_optimizers = make_optimizers(drafter), make_optimizers(other)
    take_step(drafter, optimizers, 0)
    progress = Progress({"seed": "0"}, step=1, best=1.5, seconds=2.0, log=[{"step": 1}])
    save_checkpoint(tmp_path / "checkpoint.safetensors", drafter, optimizers, progress)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    assert load_checkpoint(tmp_path / "checkpoint.safetensors", other, other_optimizers) == progress
    for networks in ((drafter, optimizers), (other, other_optimizers)):
        take_step(*networks, 1)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name


def test_read_progress_reads_the_stored_format(tmp_path):
    """A change of the format would make the runs of earlier versions unusable."""
    path = tmp_path / "checkpoint.safetensors"
    stored = '{"step": 3, "best": 1.5, "seconds": 2.0, "log": [{"step": 3}], "settings": {"seed": "0"}}'
    save_file({"model.fc.weight": torch.zeros(1)}, path, {"progress": stored})
    assert read_progress(path) == Progress({"seed": "0"}, 3, 1.5, 2.0, [{"step": 3}])
    assert dataclasses.asdict(read_progress(path)) == json.loads(stored)


def test_run_settings_include_everything_that_affects_the_result(tmp_path):
    sequences = [Sequence(random_ids(8)[0], 3, 0.0)]
    config = TrainConfig(data=tmp_path / "data", output=tmp_path, layer_ids=[0, 2], features=tmp_path)
    settings = run_settings(config, sequences)
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(settings) == names - {"output", "features", "evaluate_every"}
    assert settings["layer_ids"] == "[0, 2]" and settings["initial"] == "None" and settings["learning_rate"] == "0.002"
    moved = dataclasses.replace(config, data=tmp_path / "elsewhere", output=tmp_path / "out", evaluate_every=5)
    assert run_settings(moved, sequences) == settings
    assert run_settings(config, [Sequence(random_ids(8, seed=1)[0], 3, 0.0)])["data"] != settings["data"]


def test_check_same_run_names_the_settings_that_differ(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, torch.nn.Linear(2, 2), [], Progress({"seed": "0", "steps": "5", "decay": "4.0"}))
    check_same_run(path, {"seed": "0", "steps": "5", "decay": "4.0"})
    with pytest.raises(ValueError, match=r"other settings \(seed, decay\)"):
        check_same_run(path, {"seed": "1", "steps": "5", "decay": "2.0"})
