"""Draws: distinct where they must be, with the right distribution, and repeatable."""

import pytest
import torch
from helpers import process_default
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.sampling.randomness import Randomness


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 4), excluded=st.sets(st.integers(0, 4), max_size=2))
def test_draw_outside_without_replacement_is_distinct_and_outside(seed, n, excluded):
    weights = torch.rand(8, generator=torch.Generator().manual_seed(seed)) ** 8  # some carry almost everything
    for tokens in Randomness(seed).draw_outside(weights, [(sorted(excluded), n)] * 3, distinct=True):
        assert len(set(tokens)) == n and not set(tokens) & excluded


def test_draw_outside_without_replacement_has_its_distribution():
    """Chi-squared over the 6 ordered pairs outside the excluded token, 5 degrees of freedom: 99.9% below 20.5."""
    weights = torch.tensor([0.5, 0.3, 0.1, 0.1])
    randomness, counts, n = Randomness(0), {}, 6000
    for _ in range(n // 20):
        for pair in randomness.draw_outside(weights, [([0], 2)] * 20, distinct=True):
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    left = {1: 0.6, 2: 0.2, 3: 0.2}
    expected = {(a, b): n * left[a] * left[b] / (1 - left[a]) for a in left for b in left if a != b}
    assert sum((counts.get(pair, 0) - e) ** 2 / e for pair, e in expected.items()) < 20.5


def test_draw_has_its_distribution():
    """Chi-squared over 3 tokens, 2 degrees of freedom: 99.9% below 13.8."""
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    randomness, n = Randomness(0), 6000
    tokens = [randomness.draw(weights) for _ in range(n)]
    assert set(tokens) == {1, 3, 4}
    assert sum((tokens.count(i) - e) ** 2 / e for i, e in {1: n / 2, 3: n / 4, 4: n / 4}.items()) < 13.8


def test_draw_skips_an_index_without_weight_that_rounding_gave(monkeypatch):
    monkeypatch.setattr(Randomness, "_draw_many", lambda self, weights, n: [0, 2][:n])
    assert Randomness(0).draw(torch.tensor([0.0, 0.5, 0.5])) == 2


def test_draws_reach_the_tail_of_a_large_vocabulary():
    """100,000 tokens have 1e-8 each, and one has the rest. An fp32 cumulative sum would never give one of them."""
    weights = torch.full((100_001,), 1e-8)
    weights[0] = 1 - 1e-3
    randomness = Randomness(0)
    tokens = randomness.draw_outside(weights, [([], 40_000)], distinct=False)[0]
    assert 10 < sum(token > 0 for token in tokens) < 80  # 40 expected
    tokens = [randomness.draw(weights) for _ in range(8_000)]
    assert sum(token > 0 for token in tokens) < 30  # 8 expected, and 0 once in 3,000 times
    assert any(token > 0 for token in tokens)


def test_flip_has_its_probability_and_is_certain_from_one_on():
    randomness = Randomness(0)
    assert not any(randomness.flip(0.0) for _ in range(100)) and all(randomness.flip(1.0) for _ in range(100))
    assert sum(randomness.flip(0.3) for _ in range(3000)) == pytest.approx(900, abs=100)  # 4 standard deviations


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def test_flip_has_its_probability_under_every_default(default):
    """50,000 flips at 1e-4: 5 expected, 2.2 standard deviation. Draws in fp16 would give 19, and in bf16 115."""
    randomness = Randomness(0)
    with process_default(default):
        n_true = sum(randomness.flip(1e-4) for _ in range(50_000))
    assert 0 < n_true < 16  # up to 5 standard deviations


def test_a_seed_repeats_the_draws_and_leaves_the_global_state_alone():
    weights, before = torch.ones(1000), torch.get_rng_state()
    first, second, other = (Randomness(seed).draw_outside(weights, [([], 20)], True) for seed in (1, 1, 2))
    assert first == second != other and torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_draws_come_from_the_global_generator():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(Randomness().draw_outside(torch.ones(1000), [([], 20)], True))
    assert results[0] == results[1] != Randomness().draw_outside(torch.ones(1000), [([], 20)], True)
