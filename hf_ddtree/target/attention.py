"""Attention over a tree inside the models' own attention layers: what the keyword `ddtree` does there.

A tree forward passes a `TreeForward` as `model(..., ddtree=forward)`. Its class is the attention backend:
`MaskedForward` attends under a dense mask, `KernelForward` (kernel_attention.py) by the Triton kernel without a mask.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .._transformers import attention_functions, attention_implementation, uses_attention_interface
from ..tree import DraftTree
from .gated_delta import TreeStates
from .masks import Masks, tree_attention_mask
from .patching import Patch


class TreeForward:
    """One tree on its way through a target forward: the value of the keyword `ddtree`.

    Args:
        tree: N nodes.
        config: the target's text config.
        length: L, the number of committed tokens.
        padding_mask: `[1, L + 1]`, 0 where a committed token is padding. None if there is none.
        states: the tree's states in Gated DeltaNet layers, None for a model without them.
    """

    name: str

    def __init__(
        self, tree: DraftTree, config, length: int, padding_mask: torch.Tensor | None, states: TreeStates | None
    ):
        self.tree, self.config, self.length = tree, config, length
        self.padding_mask, self.states = padding_mask, states

    @classmethod
    def patches(cls, model: PreTrainedModel) -> list[Patch]:
        """Return the patches under which the layers of `model` call `attend`."""
        raise NotImplementedError

    def masks(self, cache: Cache, device: torch.device) -> Masks | None:
        """Return what the model gets as `attention_mask`.

        Args:
            cache: the cache before the forward.
            device: where the mask is needed.
        """
        raise NotImplementedError

    def attend(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attend in one layer, in the form of transformers' `AttentionInterface`.

        Args:
            module: the attention layer.
            query: `[1, Hq, N, D]`.
            key: `[1, Hkv, P + N, D]`: the prefix that the layer keeps, then the nodes.
            value: `[1, Hkv, P + N, Dv]`.
            attention_mask: what `masks` returned for the layer.
            kwargs: the layer's `scaling`, and where it has them `softcap`, `s_aux` (sinks) and `position_bias`.

        Returns:
            `[1, N, Hq, Dv]`, and None for the attention weights.
        """
        raise NotImplementedError


class MaskedForward(TreeForward):
    """Attends by PyTorch's attention under a dense mask.

    transformers' eager functions, which some families need for soft caps and sinks, stay in place under the same mask.
    """

    name = "sdpa"

    @classmethod
    def patches(cls, model: PreTrainedModel) -> list[Patch]:
        """Return the patches under which the layers of `model` call `attend`."""
        if not uses_attention_interface(model) or attention_implementation(text_config(model)) != "sdpa":
            return []
        return [Patch(attention_functions(), "sdpa", call_attend)]

    def masks(self, cache: Cache, device: torch.device) -> Masks | None:
        """Return dense masks.

        A lone root gets the padding mask, from which the model makes the mask of plain decoding.
        """
        if len(self.tree) == 1:
            return self.padding_mask
        depths = self.tree.depths.to(device)
        visible = self.tree.ancestor_mask
        return tree_attention_mask(self.config, cache, depths, depths, visible, self.padding_mask, device)

    def attend(
        self, module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """Attend in one layer under `attention_mask`, `[1, 1, N, P + N]`."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        # on CUDA, PyTorch has no fast attention for grouped heads under a mask
        if query.is_cuda or position_bias is not None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias
            )
        output = grouped_attention(query, key, value, attention_mask, scaling)
        return output.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return `[B, Hq, N, Dv]` without a copy of each key and value for every query head of its group."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


def call_attend(forward: TreeForward, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Call `attend` of a forward: the function that a patch puts in place of a layer's attention function."""
    return forward.attend(*args, **kwargs)


def text_config(model: PreTrainedModel):
    """Return the config of a model's decoder."""
    return model.config.get_text_config(decoder=True)


def no_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return the keyword argument that keeps a forward from returning router logits, if the model has any.

    `generate` returns no router logits. They only serve the balancing loss, which would read a tree's mask as a padding
    mask.

    Args:
        model: a target, or a causal LM as drafter.
    """
    return {"output_router_logits": False} if hasattr(text_config(model), "output_router_logits") else {}
