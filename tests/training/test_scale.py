"""The scale of the hidden states."""

import pytest
import torch
from helpers import random_ids

from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.blocks import draft_blocks, make_batch, target_states
from hf_ddtree.training.data import Sequence
from hf_ddtree.training.scale import finished_drafter, remove_scale, state_scale


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama")


@pytest.fixture
def sequences() -> list[Sequence]:
    return [Sequence(random_ids(20, seed)[0], 5, 0.0) for seed in range(2)]


def test_state_scale_brings_every_layer_to_a_root_mean_square_of_one(target, sequences):
    layer_ids = [0, 2]
    states, _ = target_states(target, make_batch(sequences, 6, 5, generator=None), layer_ids)
    scaled = states * state_scale(target, layer_ids, sequences)
    spread = scaled.unflatten(-1, (len(layer_ids), -1)).square().mean(-1).sqrt()
    torch.testing.assert_close(spread.flatten(0, 1).median(0).values, torch.ones(len(layer_ids)))


@torch.no_grad()
def test_finished_drafter_takes_unscaled_states(target, sequences):
    drafter = tiny_dflash_drafter(target)
    batch = make_batch(sequences, 6, drafter.config.block_size, torch.Generator().manual_seed(0))
    context, _ = target_states(target, batch, drafter.config.target_layer_ids)
    scale = state_scale(target, drafter.config.target_layer_ids, sequences)
    scale = scale * torch.rand(len(scale), generator=torch.Generator().manual_seed(0))
    embedding = target.get_input_embeddings()
    expected = draft_blocks(drafter, drafter.config, embedding, batch, context * scale)
    states = draft_blocks(finished_drafter(drafter, scale), drafter.config, embedding, batch, context)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_remove_scale_undoes_finished_drafter(target):
    drafter = tiny_dflash_drafter(target)
    scale = torch.rand(drafter.fc.in_features, generator=torch.Generator().manual_seed(0)) + 0.5
    finished = finished_drafter(drafter, scale)
    assert not torch.equal(finished.fc.weight, drafter.fc.weight)
    remove_scale(finished, scale)
    torch.testing.assert_close(finished.fc.weight, drafter.fc.weight)
