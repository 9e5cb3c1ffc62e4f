"""The optimizers and their learning rate."""

from itertools import pairwise

import pytest

from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.optimizers import learning_rate, make_optimizers, set_learning_rate


def test_learning_rate_warms_up_and_falls_to_its_end(tmp_path):
    config = TrainConfig(data=tmp_path, output=tmp_path, learning_rate=0.5, warmup=10, steps=110)
    rates = [learning_rate(step, config) for step in range(111)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == max(rates) == 0.5
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[60] == pytest.approx(0.5 * (1 + 0.03) / 2) and rates[110] == pytest.approx(0.03 * 0.5)


def test_make_optimizers_covers_every_parameter_once():
    drafter = tiny_dflash_drafter(tiny_model("llama"))
    optimizers = make_optimizers(drafter)
    covered = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in drafter.parameters())
    set_learning_rate(optimizers, 0.125)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.125}
