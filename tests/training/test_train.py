"""The training loop: it learns, and a run that was killed continues to the same result."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_ddtree
from hf_ddtree.training import train as train_module


def log_of(folder: Path) -> list[dict]:
    """The log of a run without the times."""
    log = json.loads((folder / "training_log.json").read_text())["log"]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in log]


def test_train_raises_the_acceptance(trained):
    log = log_of(trained)
    figures = [entry["tokens_per_round"]["16"] for entry in log]
    assert [entry["step"] for entry in log] == [20, 40, 60]
    assert log[-1]["loss"] < log[0]["loss"]
    assert max(figures) > 1.3 and figures[-1] >= figures[0]


def test_train_writes_a_drafter_with_a_card(trained):
    drafter = hf_ddtree.load_drafter(trained)
    assert drafter.dtype == torch.bfloat16 and drafter.config.block_size == 4
    assert "# DFlash drafter for" in (trained / "README.md").read_text()
    assert not [path for path in trained.iterdir() if "unfinished" in path.name]


def test_train_resumes_a_killed_run_to_the_same_result(trained, run_command, train_settings, tmp_path, monkeypatch):
    original = train_module.learning_rate

    def killed_at_step_33(step, config):
        if step == 33:
            raise KeyboardInterrupt
        return original(step, config)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module, "learning_rate", killed_at_step_33)
        run_command("train", output=tmp_path, **train_settings)
    assert len(log_of(tmp_path)) == 1
    run_command("train", output=tmp_path, **train_settings)
    assert log_of(tmp_path) == log_of(trained)
    resumed, whole = (load_file(folder / "checkpoint.safetensors") for folder in (tmp_path, trained))
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)
