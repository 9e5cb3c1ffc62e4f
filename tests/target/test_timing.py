"""Timing verifications, and the name under which the times are stored."""

import time

import numpy as np
import pytest
import torch

import hf_ddtree
from hf_ddtree.budget.cost import VerifyCost
from hf_ddtree.target import timing
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.kernel_attention import KernelForward
from hf_ddtree.target.timing import LENGTHS, SIZES, cpu_name, fingerprint, now, time_verification
from hf_ddtree.testing import RECURRENT_FAMILIES, tiny_model

CPU = torch.device("cpu")
KINDS = ["llama", "gpt2", "gemma3_text", "gpt_oss", "qwen3_next", next(iter(RECURRENT_FAMILIES))]


@pytest.mark.parametrize("family", KINDS)
def test_time_verification_measures_every_kind_of_model(family):
    model = hf_ddtree.enable(tiny_model(family))
    times = time_verification(model, CPU, MaskedForward)
    assert all(len(row) == len(times.sizes) for row in times.seconds)
    assert times.sizes == list(SIZES[: len(times.sizes)]) and times.lengths[0] < times.lengths[1] <= LENGTHS[1]
    longest = model.config.get_text_config().max_position_embeddings
    assert times.sizes[-1] + times.lengths[1] <= longest
    cost = VerifyCost(times.sizes, times.lengths, times.seconds)
    assert (cost.seconds(np.arange(1, 2000), 100_000) > 0).all()


@pytest.mark.parametrize("positions", [7, 64])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_time_verification_stays_within_few_positions(family, positions):
    """A model with learned positions fails beyond the last one."""
    model = tiny_model(family, max_position_embeddings=positions, n_positions=positions)
    assert model.config.max_position_embeddings == positions
    assert time_verification(model, CPU, MaskedForward).seconds


def test_time_verification_ends_where_it_takes_too_long_or_too_much_memory(monkeypatch):
    times = {1: 0.1, 3: 0.2, 5: 3.0}
    monkeypatch.setattr(timing, "_median_seconds", lambda target, n: times[n])
    assert time_verification(tiny_model("llama"), CPU, MaskedForward).sizes == [1, 3, 5]

    def out_of_memory(target, n):
        if n > 3:
            raise torch.OutOfMemoryError
        return times[n]

    monkeypatch.setattr(timing, "_median_seconds", out_of_memory)
    assert time_verification(tiny_model("llama"), CPU, MaskedForward).sizes == [1, 3]


def test_time_verification_needs_two_sizes(monkeypatch):
    def out_of_memory(target, n):
        if n > 1:
            raise torch.OutOfMemoryError
        return 0.1

    monkeypatch.setattr(timing, "_median_seconds", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        time_verification(tiny_model("llama"), CPU, MaskedForward)


def test_now_reads_the_clock_in_seconds():
    before = time.perf_counter()
    assert before <= now(CPU) <= time.perf_counter()


def test_fingerprint_names_what_the_time_depends_on():
    model = tiny_model("llama")
    names = [fingerprint(model, CPU, attention) for attention in (MaskedForward, KernelForward)]
    names.append(fingerprint(tiny_model("llama", num_hidden_layers=3), CPU, MaskedForward))
    names.append(fingerprint(tiny_model("llama", attn_implementation="eager"), CPU, MaskedForward))
    names.append(fingerprint(tiny_model("llama").to(torch.bfloat16), CPU, MaskedForward))
    assert len(set(names)) == len(names)


def test_fingerprint_ignores_weights_and_the_name_of_the_model():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    other.config._name_or_path = "elsewhere"
    assert fingerprint(model, CPU, MaskedForward) == fingerprint(other, CPU, MaskedForward)


def test_cpu_name_is_not_empty():
    assert cpu_name().strip()
