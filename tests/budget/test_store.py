"""The measured costs, kept in the user's cache directory."""

import json
from pathlib import Path

import pytest
import torch

from hf_ddtree.budget import store
from hf_ddtree.budget.store import verify_cost
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.kernel_attention import KernelForward
from hf_ddtree.target.timing import VerifyTimes
from hf_ddtree.testing import tiny_model

CPU = torch.device("cpu")
TIMES = VerifyTimes([1, 3, 5], [8, 16], [[0.1, 0.2, 0.4], [0.1, 0.3, 0.6]])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Use an empty cache directory, and return the arguments of every measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, original = [], store.time_verification

    def spy(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(store, "time_verification", spy)
    return calls


def files(tmp_path) -> list[Path]:
    return list((tmp_path / "hf_ddtree" / "verify-cost").iterdir())


def content(sizes=(1, 3), lengths=(8, 16), measured=((0.1, 0.2), (0.1, 0.3))) -> str:
    return json.dumps({"sizes": sizes, "lengths": lengths, "measured": measured})


BROKEN = [
    "",
    "{",
    "[]",
    json.dumps({"sizes": [1]}),
    content(sizes=[], lengths=[], measured=[]),
    content(sizes=[1], measured=[[0.1], [0.1]]),
    content(sizes=[3, 1]),
    content(measured=[[0.1, 0.2]]),
    content(measured=[[0.1, 0.2], [0.0, 0.2]]),
    content(measured=[[0.1, 0.2], [0.1, float("nan")]]),
    content(measured=[["a", 0.2], [0.1, 0.2]]),
]


def test_verify_cost_measures_once_per_model_and_setting(measured, tmp_path):
    model = tiny_model("llama")
    first = verify_cost(model, CPU, MaskedForward)
    assert verify_cost(tiny_model("llama", seed=1), CPU, MaskedForward) == first, "another model of the same shape"
    assert len(measured) == 1
    verify_cost(tiny_model("llama", num_hidden_layers=3), CPU, MaskedForward)
    verify_cost(model.to(torch.bfloat16), CPU, MaskedForward)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    verify_cost(model, CPU, MaskedForward)
    torch.set_num_threads(threads)
    assert len(measured) == 4
    assert len(list((tmp_path / "hf_ddtree" / "verify-cost").glob("*.json"))) == len(files(tmp_path)) == 4


def test_verify_cost_is_one_per_attention_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backends = []

    def measure(model, device, attention):
        backends.append(attention)
        return TIMES

    monkeypatch.setattr(store, "time_verification", measure)
    for attention in (MaskedForward, KernelForward) * 2:
        cost = verify_cost(tiny_model("llama"), CPU, attention)
        assert (cost.sizes, cost.lengths, cost.measured) == (TIMES.sizes, TIMES.lengths, TIMES.seconds)
    assert backends == [MaskedForward, KernelForward]


def test_verify_cost_reads_a_sound_file(measured, tmp_path):
    model = tiny_model("llama")
    verify_cost(model, CPU, MaskedForward)
    files(tmp_path)[0].write_text(content())
    assert verify_cost(model, CPU, MaskedForward).sizes == [1, 3] and len(measured) == 1


@pytest.mark.parametrize("text", BROKEN)
def test_verify_cost_replaces_a_broken_file(measured, tmp_path, text):
    model = tiny_model("llama")
    cost = verify_cost(model, CPU, MaskedForward)
    (kept,) = files(tmp_path)
    kept.write_text(text)
    verify_cost(model, CPU, MaskedForward)
    assert len(measured) == 2
    assert json.loads(kept.read_text())["sizes"] == cost.sizes


def test_verify_cost_without_a_home_directory_measures_and_stores_nothing(measured, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert verify_cost(tiny_model("llama"), CPU, MaskedForward).measured
    assert len(measured) == 1 and not list(tmp_path.iterdir())


def test_verify_cost_works_where_the_directory_cannot_be_written(measured, tmp_path):
    (tmp_path / "hf_ddtree").write_text("in the way")
    assert len(verify_cost(tiny_model("llama"), CPU, MaskedForward).sizes) >= 2
