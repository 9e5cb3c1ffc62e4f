"""The verification cost that the automatic budget uses."""

import pytest

from hf_ddtree.benchmark import verify_cost as module
from hf_ddtree.benchmark.verify_cost import save_cost_plot, target_cost, verify_cost_table
from hf_ddtree.budget.cost import VerifyCost
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.testing import tiny_model


@pytest.fixture
def cost():
    return VerifyCost([1, 3, 5], [64, 1024], [[0.010, 0.030, 0.020], [0.020, 0.030, 0.040]])


def test_target_cost_asks_for_the_attention_that_generate_chooses(cost, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "verify_cost", lambda *arguments: asked.append(arguments) or cost)
    target = tiny_model("llama")
    assert target_cost(target) is cost
    assert asked == [(target, target.device, MaskedForward)]


def test_verify_cost_table_has_the_convex_function_beside_the_measurement(cost):
    table = verify_cost_table(cost)
    assert "| n | measured, 64 tokens | convex, 64 tokens | measured, 1024 tokens | convex, 1024 tokens |" in table
    assert "| 3 | 30.0 | 15.0 | 30.0 | 30.0 |" in table


def test_save_cost_plot_writes_a_png(cost, tmp_path):
    save_cost_plot(cost, str(tmp_path / "cost.png"))
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
