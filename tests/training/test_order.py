"""Which sequences every step sees."""

import torch

from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.data import Sequence
from hf_ddtree.training.order import BatchOrder, epoch_batches


def test_epoch_batches_visits_everything_once_in_similar_lengths():
    sequences = [Sequence(torch.zeros(1 + i % 37), 0, 0.0) for i in range(512)]
    order = epoch_batches(sequences, 8, seed=3)
    assert sorted(i for batch in order for i in batch) == list(range(512))
    assert order == epoch_batches(sequences, 8, seed=3) != epoch_batches(sequences, 8, seed=4)
    spread = [max(len(sequences[i].tokens) for i in b) - min(len(sequences[i].tokens) for i in b) for b in order]
    assert sum(spread) / len(spread) < 4


def test_step_batches_of_all_processes_cover_an_epoch(tmp_path):
    sequences = [Sequence(torch.full((3,), i), 0, 0.0) for i in range(24)]
    config = TrainConfig(data=tmp_path, output=tmp_path, batch_size=2, accumulate=3, seed=5)
    orders = [BatchOrder(sequences, config, process, 2) for process in range(2)]
    batches = [batch for step in range(2) for order in orders for batch in order.step_batches(step)]
    seen = [[int(sequence.tokens[0]) for sequence in chosen] for chosen, _ in batches]
    assert sorted(i for batch in seen for i in batch) == list(range(24))
    draws = {float(torch.rand(1, generator=generator)) for _, generator in batches}
    assert len(draws) == len(batches)


def test_step_batches_depend_on_the_seed_and_the_step_alone(tmp_path):
    sequences = [Sequence(torch.full((3,), i), 0, 0.0) for i in range(24)]
    config = TrainConfig(data=tmp_path, output=tmp_path, batch_size=5, accumulate=3)
    order = BatchOrder(sequences, config)
    in_turn = [list(order.step_batches(step)) for step in range(4)]  # 4 batches an epoch: a step may touch two epochs
    for step in (3, 1):
        for (chosen, generator), (expected, _) in zip(
            BatchOrder(sequences, config).step_batches(step), in_turn[step], strict=True
        ):
            assert [int(s.tokens[0]) for s in chosen] == [int(s.tokens[0]) for s in expected]
            assert generator.initial_seed() != config.seed
