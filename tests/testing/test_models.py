"""The small random models."""

import pytest
import torch

from hf_ddtree.testing import ALL_FAMILIES, VOCAB_SIZE, tiny_model, truncated_copy


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_tiny_model_is_small_and_in_evaluation_mode(family):
    model = tiny_model(family)
    assert model.dtype == torch.float32 and not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 400_000
    assert model.config.get_text_config(decoder=True).vocab_size == VOCAB_SIZE


def test_tiny_model_depends_on_its_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_truncated_copy_has_the_first_layers_and_the_head():
    target = tiny_model("gemma3_text")
    drafter = truncated_copy(target, 1)
    assert len(drafter.model.layers) == 1
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    assert torch.equal(drafter.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)
