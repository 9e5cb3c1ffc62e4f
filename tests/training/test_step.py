"""The loss of one batch."""

import pytest
import torch
from helpers import random_ids
from transformers import AutoModelForCausalLM

from hf_ddtree.training.blocks import IGNORED, make_batch
from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.data import Sequence
from hf_ddtree.training.run import start_run
from hf_ddtree.training.step import Tally, batch_loss, teacher_states


def test_teacher_states_stand_one_token_before_the_labels():
    sequences = [Sequence(random_ids(n, seed=n)[0], 3, 0.0) for n in (8, 14)]
    batch = make_batch(sequences, 4, 4, torch.Generator().manual_seed(0))
    last = torch.arange(14.0).expand(2, 14)[..., None]  # each state holds its own position
    positions = teacher_states(batch, last)[..., 0]
    for row, sequence in enumerate(sequences):
        is_label = batch.labels[row] != IGNORED
        following = sequence.tokens[positions[row][is_label].long() + 1]
        assert following.tolist() == batch.labels[row][is_label].tolist()


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_batch_loss_is_the_same_with_stored_states(target_folder, train_settings, tmp_path, kl_weight):
    results = []
    for features in (None, tmp_path / "states"):
        config = TrainConfig(**train_settings, output=tmp_path / "out", features=features, kl_weight=kl_weight)
        run = start_run(AutoModelForCausalLM.from_pretrained(target_folder), config)
        sequences, generator = next(run.order.step_batches(0))
        loss, counts = batch_loss(run, sequences, generator)
        loss.backward()
        results.append((loss.detach(), counts, run.drafter.fc.weight.grad))
    for computed, stored in zip(*results, strict=True):
        torch.testing.assert_close(stored, computed, rtol=1e-4, atol=1e-5)
    assert results[0][2].abs().max() > 0


def test_tally_counts_all_batches():
    tally = Tally()
    tally.add(torch.tensor(2.0, requires_grad=True), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    tally.add(torch.tensor(4.0), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    assert tally.mean_loss() == 3.0 and tally.accuracy() == [0.25]
