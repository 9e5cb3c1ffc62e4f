"""The DFlash model in the z-lab layout: its weights, its config, and equality with transformers' own implementation."""

import copy
import pickle

import pytest
import torch
from helpers import draft_from_scratch, random_ids, write_speculators_drafter

import hf_ddtree
from hf_ddtree.drafters.dflash_model import check_block, evenly_spaced_layers
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PUBLISHED_NAMES = {
    *(f"layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in ("q", "k", "v", "o")),
    *(f"layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ("q_norm", "k_norm")),
    *(f"layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")),
    *(f"layers.{i}.{name}_layernorm.weight" for i in range(2) for name in ("input", "post_attention")),
    *("norm.weight", "fc.weight", "hidden_norm.weight"),
}


def speculators_drafter(target, folder):
    return hf_ddtree.load_drafter(write_speculators_drafter(folder, target))


def test_model_weights_have_their_published_names_and_shapes():
    state = tiny_dflash_drafter(tiny_model("llama")).state_dict()
    assert set(state) == PUBLISHED_NAMES
    assert state["fc.weight"].shape == (32, 2 * 32)


@torch.no_grad()
def test_model_forward_equals_transformers_own_implementation():
    """The architecture is the same under other names, so the weights can be moved over."""
    target = tiny_model("llama")
    ours, theirs = tiny_dflash_drafter(target), tiny_muse_glimmer_drafter(target)
    theirs.config.layer_types = ["full_attention"] * 2
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): value for name, value in ours.state_dict().items()})
    sequence = random_ids(WINDOW + 8, seed=1)
    drafted = draft_from_scratch(ours, target, sequence)
    expected = draft_from_scratch(theirs, target, sequence)
    torch.testing.assert_close(drafted, expected, rtol=2e-4, atol=2e-4)  # fp32 rounding over the layers


@pytest.mark.parametrize("num_layers, expected", [(1, [18]), (2, [1, 33]), (5, [1, 9, 17, 25, 33])])
def test_config_without_layer_ids_spaces_them_evenly(num_layers, expected):
    config = hf_ddtree.DFlashConfig(
        num_hidden_layers=num_layers, num_target_layers=36, block_size=16, dflash_config={"mask_token_id": 3}
    )
    assert config.target_layer_ids == evenly_spaced_layers(36, num_layers) == expected


def test_config_reads_the_block_size_from_either_place():
    fields = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert hf_ddtree.DFlashConfig(dflash_config={**fields, "block_size": 7}).block_size == 7
    assert hf_ddtree.DFlashConfig(block_size=5, dflash_config={**fields, "block_size": 7}).block_size == 5


@pytest.mark.parametrize(
    "block, message",
    [
        ((5, None, [0, 2]), "mask_token_id"),
        ((None, 3, [0, 2]), "block_size of at least 2.*None"),
        ((1, 3, [0, 2]), "block_size of at least 2.*1"),
        (("5", 3, [0, 2]), "block_size"),
        ((5, 3, None), "target_layer_ids"),
        ((5, 3, []), "target_layer_ids"),
    ],
)
def test_check_block_names_what_is_missing(block, message):
    with pytest.raises(ValueError, match=f"some/drafter: .*{message}"):
        check_block(*block, "some/drafter")
    check_block(2, 0, [0], "some/drafter")


def test_generation_config_of_the_model_names_the_budget():
    """Plain assisted decoding reads it. To everything else, the model has none."""
    drafter = tiny_dflash_drafter(tiny_model("llama"))
    assert not hasattr(drafter, "generation_config")
    with pytest.raises(ValueError, match=r"assistant_model: a DFlashDraftModel .*enable\(model\).*tree_budget"):
        drafter.generation_config  # noqa: B018
    with pytest.raises(AttributeError, match="'DFlashDraftModel' object has no attribute 'other'"):
        drafter.other  # noqa: B018


@pytest.mark.parametrize("make_drafter", [tiny_dflash_drafter, speculators_drafter], ids=["z-lab", "speculators"])
def test_model_without_a_budget_is_refused_by_a_plain_target(make_drafter, tmp_path):
    target, prompt = tiny_model("llama"), random_ids(12)
    drafter = make_drafter(target) if make_drafter is tiny_dflash_drafter else make_drafter(target, tmp_path)
    with pytest.raises(ValueError, match=r"assistant_model: .*hf_ddtree\.enable\(model\).*tree_budget"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda drafter: pickle.loads(pickle.dumps(drafter))], ids=["deepcopy", "pickle"]
)
def test_model_survives_copying(make_copy):
    drafter = tiny_dflash_drafter(tiny_model("llama"))
    copied = make_copy(drafter)
    assert type(copied) is type(drafter)
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in drafter.state_dict().items())
