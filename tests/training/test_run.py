"""Starting and resuming a run, and what is refused."""

import shutil

import pytest
import torch
from helpers import random_ids

from hf_ddtree.training.data import Sequence, shard_path, write_shard
from hf_ddtree.training.run import most_frequent


def write_data(folder, n: int, temperature: float) -> None:
    """Write a shard of `n` sequences."""
    sequences = [Sequence(random_ids(12, seed)[0], 4, temperature) for seed in range(n)]
    write_shard(shard_path(folder, 0), sequences, {})


def test_start_run_refuses_a_checkpoint_of_other_settings(trained, run_command, train_settings, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(trained, output)
    with pytest.raises(ValueError, match=r"other settings .decay"):
        run_command("train", output=output, **train_settings, decay=9.0)


def test_start_run_refuses_a_checkpoint_of_other_data(
    trained, data, run_command, train_settings, generate_settings, tmp_path
):
    output, more = tmp_path / "out", tmp_path / "data"
    shutil.copytree(trained, output)
    shutil.copytree(data, more)
    run_command("generate", output=more, shards=5, **generate_settings)
    with pytest.raises(ValueError, match=r"other settings .data"):
        run_command("train", output=output, **{**train_settings, "data": more})


def test_start_run_resumes_when_only_the_data_moved(trained, data, run_command, train_settings, tmp_path):
    output, moved = tmp_path / "out", tmp_path / "moved"
    shutil.copytree(trained, output)
    shutil.copytree(data, moved)
    run_command("train", output=output, **{**train_settings, "data": moved, "evaluate_every": 7})
    assert (output / "training_log.json").read_bytes() == (trained / "training_log.json").read_bytes()


def test_start_run_refuses_data_that_fill_no_batch(run_command, train_settings, tmp_path):
    write_data(tmp_path, 10, temperature=0.0)
    with pytest.raises(ValueError, match=r"has 2 sequences to train on.*--batch-size 8"):
        run_command("train", output=tmp_path / "out", **{**train_settings, "data": tmp_path})


def test_start_run_refuses_data_without_greedy_answers(run_command, train_settings, tmp_path):
    write_data(tmp_path, 10, temperature=0.7)
    with pytest.raises(ValueError, match="--held-out 8 holds out no greedy answer"):
        run_command("train", output=tmp_path / "out", **{**train_settings, "data": tmp_path})


def test_most_frequent_counts_generated_tokens_alone():
    sequences = [Sequence(torch.tensor([1, 1, 1, 5, 5, 7]), 3, 0.0), Sequence(torch.tensor([1, 1, 7, 5, 9]), 2, 0.0)]
    assert most_frequent(sequences, 1).tolist() == [5]
    assert set(most_frequent(sequences, 10).tolist()) == {5, 7, 9}
