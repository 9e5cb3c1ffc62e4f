"""The drafter that a run starts from."""

import pytest
import torch

from hf_ddtree.testing import tiny_model
from hf_ddtree.training.config import TrainConfig
from hf_ddtree.training.initial import new_drafter, start_from
from hf_ddtree.training.scale import finished_drafter


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return TrainConfig(data=tmp_path, output=tmp_path, num_layers=2, block_size=5, mask_token_id=3, layer_ids=[0, 2])


def random_scale(target) -> torch.Tensor:
    return torch.rand(2 * target.config.hidden_size, generator=torch.Generator().manual_seed(0)) + 0.5


def test_new_drafter_takes_the_shape_of_the_target(config):
    target = tiny_model("llama")
    shape = new_drafter(target, config).config
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(shape, name) == getattr(target.config, name), name
    assert (shape.num_hidden_layers, shape.block_size, shape.mask_token_id) == (2, 5, 3)
    assert shape.target_layer_ids == [0, 2] and shape.num_target_layers == 4


def test_start_from_continues_with_the_weights_of_a_finished_drafter(config, tmp_path):
    target = tiny_model("llama")
    trained, fresh = (new_drafter(target, config) for _ in range(2))
    scale = random_scale(target)
    finished_drafter(trained, scale).save_pretrained(tmp_path)
    start_from(str(tmp_path), fresh, scale)
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], weight)


def test_start_from_refuses_a_drafter_of_another_shape(config, tmp_path):
    target = tiny_model("llama")
    new_drafter(target, config).save_pretrained(tmp_path)
    config.block_size = 4
    with pytest.raises(ValueError, match=r"--initial .*--block-size 5 \(not 4\)"):
        start_from(str(tmp_path), new_drafter(target, config), random_scale(target))


def test_start_from_refuses_a_causal_lm(config, tmp_path):
    target = tiny_model("llama")
    target.save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match=r"--initial .*LlamaForCausalLM.*DFlash"):
        start_from(str(tmp_path / "causal"), new_drafter(target, config), random_scale(target))
