"""The DFlash block-diffusion model in the z-lab v1 checkpoint layout."""

from typing import ClassVar

import torch
from torch import nn
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import create_bidirectional_sliding_window_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from ..messages import quoted
from .base import NeedsTreeError


class DFlashConfig(Qwen3Config):
    """A Qwen3 config plus the DFlash fields of the z-lab v1 layout.

    Args:
        num_target_layers: the number of decoder layers of the target that the drafter was trained for.
        block_size: tokens per block, the root included.
        dflash_config: `mask_token_id`, `target_layer_ids`, and in later checkpoints `block_size`.

    Example:
        >>> fields = {"mask_token_id": 3, "target_layer_ids": [1, 5]}
        >>> config = hf_ddtree.DFlashConfig(block_size=8, dflash_config=fields)
        >>> config.target_layer_ids
        [1, 5]
    """

    model_type = "qwen3"  # as in published checkpoints

    num_target_layers: int | None = None
    block_size: int | None = None
    dflash_config: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        fields = dict(self.dflash_config or {})
        if self.block_size is None:
            self.block_size = fields.get("block_size")
        if fields.get("target_layer_ids") is None and self.num_target_layers is not None:
            fields["target_layer_ids"] = evenly_spaced_layers(self.num_target_layers, self.num_hidden_layers)
        self.dflash_config = fields

    @property
    def mask_token_id(self) -> int | None:
        """The token that stands for a token to be drafted."""
        return (self.dflash_config or {}).get("mask_token_id")

    @property
    def target_layer_ids(self) -> list[int] | None:
        """The target's layers whose output the drafter reads, counted from 0."""
        return (self.dflash_config or {}).get("target_layer_ids")


def evenly_spaced_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Return the tapped layers of a checkpoint that lists none: from 1 to num_target_layers - 3, or the middle one.

    Args:
        num_target_layers: the number of decoder layers of the target.
        num_draft_layers: the number of layers of the drafter, which taps as many.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


class DFlashAttention(Qwen3Attention):
    """Attention whose queries come from the block, and whose keys and values come from the context and the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(self, hidden_states, context_hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
        kv_states = torch.cat([context_hidden_states, hidden_states], dim=1)
        queries = self.q_norm(self._heads(self.q_proj(hidden_states)))
        keys = self.k_norm(self._heads(self.k_proj(kv_states)))
        values = self._heads(self.v_proj(kv_states))

        cos, sin = (embedding[:, None] for embedding in position_embeddings)
        n = queries.shape[2]
        queries = queries * cos[:, :, -n:] + rotate_half(queries) * sin[:, :, -n:]
        keys = keys * cos + rotate_half(keys) * sin
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DFlashDecoderLayer(Qwen3DecoderLayer):
    """A Qwen3 layer with `DFlashAttention`."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)


class DFlashDraftModel(Qwen3PreTrainedModel):
    """The DFlash drafter (Chen, Liang & Liu, arXiv 2602.06036) in the z-lab v1 checkpoint layout.

    It has neither an embedding nor a head, because it uses the target's. Its `forward` takes the same keywords as that
    of transformers' own DFlash drafters.

    Args:
        config: must have `mask_token_id`, `target_layer_ids` and `block_size`.

    Example:
        >>> drafter = hf_ddtree.load_drafter("z-lab/Qwen3-4B-DFlash-b16")
        >>> type(drafter).__name__
        'DFlashDraftModel'
    """

    config: DFlashConfig
    config_class = DFlashConfig
    _no_split_modules: ClassVar = ["DFlashDecoderLayer"]
    main_input_name = "noise_embeds"

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        n_taps = len(config.target_layer_ids or ())
        self.fc = nn.Linear(n_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: DFlashCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Denoise a block, given new context.

        Args:
            noise_embeds: `[B, n, H]`, the target's embeddings of the root and of n - 1 mask tokens.
            context_hidden_states: `[B, c, taps * H]`, the tapped target states of the tokens before the root that are
                not in the cache yet.
            position_ids: `[B, c + n]` int64, the positions of the new context and the block.
            attention_mask: `[B, 1, n, T]`, an additive mask for several blocks at once in training. With None, every
                query sees everything within its layer's window.
            cache: context keys and values. The caller announces c to it, and drops the block afterwards.
            kwargs: passed on to the attention function.

        Returns:
            `last_hidden_state` `[B, n, H]`, from which the target's head computes logits, and the cache.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        masks = {"full_attention": attention_mask, "sliding_attention": attention_mask}
        if attention_mask is None and "sliding_attention" in self.config.layer_types:
            masks["sliding_attention"] = self._sliding_mask(noise_embeds, context.shape[1], cache)
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                context_hidden_states=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def __getattr__(self, name: str):
        # plain assisted decoding reads it first, and nothing else tells the user what is missing
        if name == "generation_config":
            raise NeedsTreeError(self, name)
        return super().__getattr__(name)

    def _sliding_mask(self, noise_embeds: torch.Tensor, n_context: int, cache: DFlashCache | None):
        """Return what a block sees in sliding layers, given `n_context` tokens of context that are not cached yet."""
        return create_bidirectional_sliding_window_mask(
            config=self.config, inputs_embeds=noise_embeds, attention_mask=None, cache=cache
        )


def check_block(block_size, mask_token_id, target_layer_ids, source: str) -> None:
    """Raise a ValueError if a field that drafting a block needs is missing or impossible.

    Args:
        block_size: tokens per block, the root included.
        mask_token_id: the token that stands for a token to be drafted.
        target_layer_ids: the target's layers that the drafter reads.
        source: the checkpoint or argument that the fields come from, for the message.
    """
    if mask_token_id is None:
        raise ValueError(f"{source}: the drafter's config lacks dflash_config.mask_token_id; add it to config.json.")
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(
            f"{source}: the drafter's config needs a block_size of at least 2; it has {quoted(block_size)}."
        )
    if not target_layer_ids:
        raise ValueError(
            f"{source}: the drafter's config has neither dflash_config.target_layer_ids nor num_target_layers; add one "
            "to config.json."
        )
