"""The measured cost of verification: its shape, and where it is kept."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_ddtree
from hf_ddtree import cost as cost_module
from hf_ddtree.cost import LENGTHS, SIZES, VerifyCost, convex_below, verify_cost
from hf_ddtree.testing import RECURRENT_FAMILIES, tiny_model

SECONDS = st.lists(st.floats(0.001, 10), min_size=len(SIZES), max_size=len(SIZES))


@settings(max_examples=200, deadline=None)
@given(seconds=SECONDS)
def test_it_is_convex_rises_and_stays_below_what_was_measured(seconds):
    curve = np.array(convex_below(SIZES, seconds))
    slopes = np.diff(curve) / np.diff(SIZES)
    assert (slopes >= -1e-12).all() and (np.diff(slopes) >= -1e-9).all()
    assert (curve <= np.array(seconds) + 1e-12).all()


def test_what_is_convex_already_stays():
    seconds = [1.0 + 0.001 * n**1.5 for n in SIZES]
    assert convex_below(SIZES, seconds) == pytest.approx(seconds)


def test_between_and_beyond_what_was_measured():
    cost = VerifyCost([1, 3, 5], [10, 20], [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]])
    assert float(cost.seconds(1, 10)) == 1 and float(cost.seconds(2, 10)) == 1.5
    assert float(cost.seconds(7, 10)) == 6  # as from 3 to 5
    assert float(cost.seconds(3, 15)) == 3 and float(cost.seconds(3, 30)) == 6
    assert float(cost.seconds(3, 1)) == 2, "no less than at the shorter length"
    assert cost.seconds(np.array([1, 2, 7]), 10).tolist() == [1, 1.5, 6]


def test_a_longer_text_is_never_cheaper():
    cost = VerifyCost([1, 3], [10, 20], [[2.0, 4.0], [1.0, 5.0]])
    assert float(cost.seconds(1, 20)) == 2 and float(cost.seconds(3, 20)) == 5


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """An empty cache directory, and how often something is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, original = [], cost_module.measure

    def spy(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(cost_module, "measure", spy)
    return calls


CPU = torch.device("cpu")


def test_it_is_measured_once_per_model_and_setting(counted, tmp_path):
    model = tiny_model("llama")
    first = verify_cost(model, CPU, False)
    assert verify_cost(tiny_model("llama", seed=1), CPU, False) == first, "another model of the same shape"
    assert len(counted) == 1
    verify_cost(tiny_model("llama", num_hidden_layers=3), CPU, False)
    verify_cost(model.to(torch.bfloat16), CPU, False)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    verify_cost(model, CPU, False)
    torch.set_num_threads(threads)
    assert len(counted) == 4
    assert len(list((tmp_path / "hf_ddtree" / "verify-cost").glob("*.json"))) == 4


def file(sizes=(1, 3), lengths=(8, 16), measured=((0.1, 0.2), (0.1, 0.3))) -> str:
    return json.dumps({"sizes": sizes, "lengths": lengths, "measured": measured})


BROKEN = [
    file(sizes=[], lengths=[], measured=[]),
    file(sizes=[1], measured=[[0.1], [0.1]]),
    file(sizes=[3, 1]),
    file(measured=[[0.1, 0.2]]),
    file(measured=[[0.1, 0.2], [0.0, 0.2]]),
    file(measured=[[0.1, 0.2], [0.1, float("nan")]]),
    file(measured=[["a", 0.2], [0.1, 0.2]]),
]


def test_a_sound_file_is_used(counted, tmp_path):
    model = tiny_model("llama")
    verify_cost(model, CPU, False)
    next((tmp_path / "hf_ddtree" / "verify-cost").iterdir()).write_text(file())
    assert verify_cost(model, CPU, False).sizes == [1, 3] and len(counted) == 1


def test_without_a_home_directory_it_is_measured_and_not_kept(counted, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cost_module.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert verify_cost(tiny_model("llama"), CPU, False).measured


def test_what_takes_too_long_or_too_much_memory_ends_the_measurement(monkeypatch):
    times = {1: 0.1, 3: 0.2, 5: 3.0}
    monkeypatch.setattr(cost_module, "_median_seconds", lambda verifier, n, *_: times[n])
    assert cost_module.measure(tiny_model("llama"), CPU, False).sizes == [1, 3, 5]

    def out_of_memory(verifier, n, *_):
        if n > 3:
            raise torch.OutOfMemoryError
        return times[n]

    monkeypatch.setattr(cost_module, "_median_seconds", out_of_memory)
    assert cost_module.measure(tiny_model("llama"), CPU, False).sizes == [1, 3]


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"sizes": [1]}), *BROKEN])
def test_a_broken_file_is_replaced(counted, tmp_path, content):
    model = tiny_model("llama")
    cost = verify_cost(model, CPU, False)
    (kept,) = (tmp_path / "hf_ddtree" / "verify-cost").iterdir()
    kept.write_text(content)
    verify_cost(model, CPU, False)
    assert len(counted) == 2
    assert json.loads(kept.read_text())["sizes"] == cost.sizes


def test_a_directory_that_cannot_be_written_is_no_error(counted, tmp_path, monkeypatch):
    (tmp_path / "hf_ddtree").write_text("in the way")
    assert len(verify_cost(tiny_model("llama"), CPU, False).sizes) >= 2


def test_models_of_few_positions_can_be_measured(counted):
    assert verify_cost(tiny_model("llama", max_position_embeddings=7), CPU, False).measured


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_oss", "qwen3_next", next(iter(RECURRENT_FAMILIES))])
def test_every_kind_of_model_can_be_measured(counted, family):
    model = hf_ddtree.enable(tiny_model(family))
    cost = verify_cost(model, CPU, False)
    assert all(len(row) == len(cost.sizes) for row in cost.measured) and cost.lengths[0] < cost.lengths[1] <= LENGTHS[1]
    longest = model.config.get_text_config().max_position_embeddings
    assert cost.sizes[-1] + cost.lengths[1] <= longest
    assert (cost.seconds(np.arange(1, 2000), 100_000) > 0).all()
