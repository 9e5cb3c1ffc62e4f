"""PyTorch's attention over a tree: which functions it replaces, its masks, and one layer's result."""

import pytest
import torch
from transformers import DynamicCache

from hf_ddtree import DraftTree
from hf_ddtree.target.attention import MaskedForward, call_attend, grouped_attention, text_config
from hf_ddtree.testing import tiny_model

TREE = DraftTree.from_lists([7, 8, 9, 10], [-1, 0, 0, 2])
CPU = torch.device("cpu")


def masked_forward(tree=TREE, padding_mask=None) -> MaskedForward:
    return MaskedForward(tree, tiny_model("llama").config, 6, padding_mask, None)


def layer_inputs(n_nodes: int = 4, n_keys: int = 10):
    """Return query, key and value of a layer with 2 query heads a KV head, and an additive mask with hidden keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, n_nodes, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, n_keys, 8, generator=generator)
    hidden = torch.rand(1, 1, n_nodes, n_keys, generator=generator) < 0.3
    return query, key, value, hidden * torch.finfo(torch.float32).min


def softmax_attention(query, key, value, mask, scaling) -> torch.Tensor:
    """Return `[1, n, 4, 8]`, head by head from the definition."""
    heads = []
    for head in range(4):
        scores = scaling * query[0, head] @ key[0, head // 2].T + mask[0, head if mask.shape[1] > 1 else 0]
        heads.append(scores.softmax(-1) @ value[0, head // 2])
    return torch.stack(heads, dim=1)[None]


@pytest.mark.parametrize("family, names", [("llama", ["sdpa"]), ("gemma2", [])])
def test_patches_replace_sdpa_and_leave_eager_attention(family, names):
    patches = MaskedForward.patches(tiny_model(family))
    assert [patch.name for patch in patches] == names
    assert all(patch.call is call_attend for patch in patches)


def test_patches_leave_models_alone_that_attend_by_code_of_their_own(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    assert MaskedForward.patches(model) == []


@pytest.mark.parametrize("padding_mask", [None, torch.tensor([[0, 0, 1, 1, 1, 1, 1]])])
def test_masks_of_a_lone_root_are_the_padding_mask(padding_mask):
    forward = masked_forward(DraftTree.chain([7]), padding_mask)
    assert forward.masks(DynamicCache(), CPU) is padding_mask


def test_masks_of_a_tree_hide_what_is_no_ancestor():
    cache, keys = DynamicCache(), torch.zeros(1, 1, 6, 1, dtype=torch.bfloat16)
    cache.update(keys, keys, 0)
    mask = masked_forward().masks(cache, CPU)
    assert mask.dtype == torch.bfloat16 and mask.shape == (1, 1, 4, 10)
    visible = mask[0, 0] == 0
    assert visible[:, :6].all() and torch.equal(visible[:, 6:], TREE.ancestor_mask)


@pytest.mark.parametrize("scaling", [None, 0.5])
def test_attend_equals_the_definition(scaling):
    query, key, value, mask = layer_inputs()
    output, weights = call_attend(masked_forward(), None, query, key, value, mask, scaling=scaling)
    expected = softmax_attention(query, key, value, mask, scaling or 8**-0.5)
    assert weights is None and output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_attend_adds_a_position_bias():
    query, key, value, mask = layer_inputs()
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    bias = torch.randn(1, 4, 4, 10, generator=torch.Generator().manual_seed(1))
    output, _ = masked_forward().attend(module, query, key, value, mask, scaling=0.5, position_bias=bias)
    torch.testing.assert_close(output, softmax_attention(query, key, value, mask + bias, 0.5), rtol=1e-5, atol=1e-5)


def test_grouped_attention_equals_the_definition():
    query, key, value, mask = layer_inputs(n_nodes=3)
    output = grouped_attention(query, key, value, mask, 0.3).transpose(1, 2)
    torch.testing.assert_close(output, softmax_attention(query, key, value, mask, 0.3), rtol=1e-5, atol=1e-5)


def test_text_config_is_that_of_the_decoder():
    multimodal, plain = tiny_model("qwen3_5"), tiny_model("llama")
    assert text_config(multimodal) is multimodal.config.text_config
    assert text_config(plain) is plain.config
