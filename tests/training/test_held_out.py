"""Keeping the best drafter."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ddtree
from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.held_out import keep_best
from hf_ddtree.training.run import start_run
from hf_ddtree.training.step import Tally


@pytest.mark.parametrize(("best", "is_kept"), [(0.0, True), (math.inf, False)])
def test_keep_best_saves_a_better_drafter_and_always_logs(target_folder, train_settings, tmp_path, best, is_kept):
    config = TrainConfig(output=tmp_path, **train_settings)
    run = start_run(AutoModelForCausalLM.from_pretrained(target_folder), config)
    run.progress.step, run.progress.seconds, run.progress.best = 20, 3.4, best
    tally = Tally()
    tally.add(torch.tensor(2.0), torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 4.0]]))
    tally.add(torch.tensor(3.0), torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 4.0]]))
    entry = keep_best(run, tally)
    assert json.loads((tmp_path / "training_log.json").read_text())["log"] == [entry] == run.progress.log
    assert (entry["step"], entry["seconds"], entry["loss"], entry["accuracy"]) == (20, 3, 2.5, [0.5, 0.25])
    assert list(entry["tokens_per_round"]) == ["chain", "16", "64"]
    assert (tmp_path / "README.md").exists() == (tmp_path / "model.safetensors").exists() == is_kept
    if is_kept:
        assert round(run.progress.best, 3) == entry["tokens_per_round"]["16"]
        assert hf_ddtree.load_drafter(tmp_path).dtype == torch.bfloat16
    assert run.drafter.training and run.drafter.dtype == torch.float32
