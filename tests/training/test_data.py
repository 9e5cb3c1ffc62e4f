"""Shards on disk and held-out sequences."""

import pytest
import torch
from helpers import random_ids

from hf_ddtree.training.data import Sequence, read_shards, shard_path, split_held_out, write_shard


def test_read_shards_returns_what_was_written(tmp_path):
    written = [Sequence(random_ids(5 + i, seed=i)[0], 2 + i, 0.5 * i) for i in range(5)]
    write_shard(shard_path(tmp_path, 0), written[:2], {"seed": "0"})
    write_shard(shard_path(tmp_path, 1), written[2:], {"seed": "1"})
    assert len(list(tmp_path.iterdir())) == 2
    sequences = read_shards(tmp_path)
    for sequence, expected in zip(sequences, written, strict=True):
        assert torch.equal(sequence.tokens, expected.tokens) and sequence.tokens.dtype == torch.long
        assert (sequence.prompt_length, sequence.temperature) == (expected.prompt_length, expected.temperature)
    assert [sequence.shard for sequence in sequences] == ["shard-00000.safetensors"] * 2 + [
        "shard-00001.safetensors"
    ] * 3
    assert [sequence.offset for sequence in sequences] == [0, 5, 0, 7, 15]


def test_read_shards_refuses_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"holds no shard.*training generate"):
        read_shards(tmp_path)


def test_split_held_out_trains_on_no_held_out_prompt():
    sequences = [Sequence(torch.tensor([i % 5, 9, 9, i]), 2, 0.0 if i % 3 else 0.7) for i in range(30)]
    training, held_out = split_held_out(sequences, 2)
    assert len(held_out) == 2 and all(sequence.temperature == 0 for sequence in held_out)
    prompts = [{tuple(s.tokens[:2].tolist()) for s in part} for part in (training, held_out)]
    assert prompts[0] and not prompts[0] & prompts[1]
