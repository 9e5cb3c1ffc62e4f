"""q, the drafter's distribution, and the estimate of how often drawn children are accepted."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_ddtree import POLICIES
from hf_ddtree.drafters.q import ACCEPTANCE_PRIOR_WEIGHT, INITIAL_ACCEPTANCE, DraftSampling

LOGITS = torch.tensor([[3.0, 1.0, 2.0, 0.0]])


def test_warp_without_warpers_returns_float32_logits():
    warped = DraftSampling(POLICIES["target"]).warp(LOGITS.bfloat16())
    assert warped.dtype == torch.float32 and torch.equal(warped, LOGITS)


def test_warp_applies_the_warpers_in_order():
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)])
    warped = DraftSampling(POLICIES["target"], warpers).warp(LOGITS)
    assert warped.tolist() == [[6.0, -torch.inf, 4.0, -torch.inf]]


def test_acceptance_starts_at_the_prior():
    assert DraftSampling(POLICIES["hybrid"]).acceptance(3) == pytest.approx(INITIAL_ACCEPTANCE)


def test_update_acceptance_averages_overlaps_by_depth():
    sampling = DraftSampling(POLICIES["hybrid"])
    sampling.update_acceptance([(1, 1.0), (2, 0.0)])
    sampling.update_acceptance([(1, 0.5)])
    prior = INITIAL_ACCEPTANCE * ACCEPTANCE_PRIOR_WEIGHT
    assert sampling.acceptance(1) == pytest.approx((prior + 1.5) / (ACCEPTANCE_PRIOR_WEIGHT + 2))
    assert sampling.acceptance(2) == pytest.approx(prior / (ACCEPTANCE_PRIOR_WEIGHT + 1))
    assert sampling.acceptance(3) == pytest.approx(INITIAL_ACCEPTANCE)


def test_randomness_takes_one_seed_from_the_global_generator_on_first_use():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    sampling = DraftSampling(POLICIES["hybrid"])
    assert torch.equal(torch.get_rng_state(), state)
    randomness = sampling.randomness
    state = torch.get_rng_state()
    draws = [randomness.draw(torch.ones(1000)) for _ in range(5)]
    assert sampling.randomness is randomness and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    again = DraftSampling(POLICIES["hybrid"]).randomness
    assert [again.draw(torch.ones(1000)) for _ in range(5)] == draws
