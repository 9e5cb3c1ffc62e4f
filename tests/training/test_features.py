"""The target's hidden states on disk."""

import pytest
import torch
from helpers import random_ids

from hf_ddtree.testing import tiny_model
from hf_ddtree.training.blocks import make_batch, target_states
from hf_ddtree.training.data import Sequence, read_shards, shard_path, split_held_out, write_shard
from hf_ddtree.training.features import compute_features, read_features


@pytest.fixture
def sequences(tmp_path) -> list[Sequence]:
    """Nine sequences from two shards."""
    sequences = [Sequence(random_ids(5 + i, seed=i)[0], 3, 0.0) for i in range(9)]
    write_shard(shard_path(tmp_path, 0), sequences[:5], {})
    write_shard(shard_path(tmp_path, 1), sequences[5:], {})
    return read_shards(tmp_path)


def test_read_features_returns_the_states_of_the_sequences(tmp_path, sequences):
    """Held-out sequences lie between the others, and two processes write the files."""
    target = tiny_model("llama").requires_grad_(False)
    folder = tmp_path / "states"
    for process in range(2):
        compute_features(target, sequences, [0, 2], folder, 4, process, num_processes=2)
    assert sorted(path.name for path in folder.iterdir()) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    training, held_out = split_held_out(sequences, 3)
    assert len(held_out) == 3
    batch = make_batch(training, 2, 4, torch.Generator().manual_seed(0))
    expected_states = target_states(target, batch, [0, 2])
    for stored, expected in zip(read_features(folder, training), expected_states, strict=True):
        torch.testing.assert_close(stored[batch.valid], expected[batch.valid], rtol=2e-4, atol=2e-4)
        assert (stored[~batch.valid] == 0).all()


def test_compute_features_refuses_the_states_of_other_settings(tmp_path, sequences):
    target = tiny_model("llama").requires_grad_(False)
    folder = tmp_path / "states"
    compute_features(target, sequences, [0, 2], folder, 4)
    compute_features(target, sequences, [0, 2], folder, 4)
    with pytest.raises(ValueError, match=r"other settings \(layer_ids\)"):
        compute_features(target, sequences, [1, 2], folder, 4)
    target.config.name_or_path = "another"
    with pytest.raises(ValueError, match=r"other settings \(target\)"):
        compute_features(target, sequences, [0, 2], folder, 4)
    target.config.name_or_path = ""
    sequences[0].tokens = sequences[0].tokens.flip(0)
    with pytest.raises(ValueError, match=r"other settings \(tokens\)"):
        compute_features(target, sequences, [0, 2], folder, 4)
