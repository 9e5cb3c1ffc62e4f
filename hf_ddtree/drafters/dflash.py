"""Drafting with a DFlash block-diffusion model: the distributions of a whole block in one forward."""

import torch
from torch import nn
from transformers import PreTrainedModel
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

from ..tree import build_tree
from .base import DraftSampling, TreeCandidateGenerator


class DFlashConfig(Qwen3Config):
    """A Qwen3 config plus the DFlash fields of the z-lab v1 layout.

    Args:
        num_target_layers: decoder layers of the target it was trained for.
        block_size: tokens per block, the root included.
        dflash_config: `mask_token_id`, `target_layer_ids`, and in later checkpoints `block_size`.
    """

    model_type = "qwen3"  # as published

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
        return self.dflash_config.get("mask_token_id")

    @property
    def target_layer_ids(self) -> list[int] | None:
        return self.dflash_config.get("target_layer_ids")


def evenly_spaced_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The tapped layers of a checkpoint that lists none: from 1 to num_target_layers - 3; one layer: the middle."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


class DFlashAttention(Qwen3Attention):
    """Queries from the block; keys and values from the target's context and the block, all visible to each other."""

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
    """A Qwen3 layer with the attention above."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)


class DFlashDraftModel(Qwen3PreTrainedModel):
    """The DFlash drafter (Chen, Liang & Liu, arXiv 2602.06036) in the z-lab v1 checkpoint layout.

    It has neither embedding nor head: both are the target's. Called like transformers' own DFlash drafters.
    """

    config: DFlashConfig
    config_class = DFlashConfig
    _no_split_modules = ["DFlashDecoderLayer"]
    main_input_name = "noise_embeds"

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
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
        """Denoise a block given new context.

        Args:
            noise_embeds: `[B, n, H]`, the target's embeddings of the root and of n - 1 mask tokens.
            context_hidden_states: `[B, c, taps * H]`, tapped target states of the tokens before the root that are not
                in the cache yet.
            position_ids: `[B, c + n]` int64.
            attention_mask: `[B, 1, n, T]` additive, for several blocks at once in training; None lets every query see
                everything within its layer's window.
            cache: context keys and values. The caller announces c to it and drops the block afterwards.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        masks = {"full_attention": attention_mask, "sliding_attention": attention_mask}
        if attention_mask is None and "sliding_attention" in self.config.layer_types:
            masks["sliding_attention"] = create_bidirectional_sliding_window_mask(
                config=self.config, inputs_embeds=noise_embeds, attention_mask=None, cache=cache
            )
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(
                hidden_states,
                context_hidden_states=context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class DFlashTreeGenerator(TreeCandidateGenerator):
    """Drafts a block from the target's hidden states and builds the best-first tree of its marginals.

    Args:
        drafter: a `DFlashDraftModel` or transformers' own `MuseGlimmerAssistantModel`.
        target: lends its embedding and its head.
        sampling: how to choose children.

    Raises:
        ValueError: if the drafter was made for another target.
    """

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel, sampling: DraftSampling):
        check_drafter(drafter, target)
        config = drafter.config
        self.drafter = drafter
        self.embed = target.get_input_embeddings()
        self.head = target.get_output_embeddings()
        self.sampling = sampling
        self.tapped_states = tuple(layer + 1 for layer in config.target_layer_ids)
        self.block_size = config.block_size
        self.mask_token_id = config.mask_token_id
        self.cache = DFlashCache(config=config)
        self.cache.activate_past_recording()
        self.root_position = None
        self.context, self.context_positions = None, None  # what is not in the cache yet

    def prefill(self, hidden_states, position_ids):
        self.context, self.context_positions = hidden_states, position_ids
        self.root_position = position_ids[:, -1:] + 1

    def get_candidates(self, input_ids, tree_budget, max_depth):
        root_token_id = int(input_ids[0, -1])
        draft_logits = self.sampling.warp(self.draft(root_token_id)[:max_depth])
        policy = self.sampling.policy
        if not policy.drawn:
            return build_tree(draft_logits, tree_budget, root_token_id)
        acceptance = [self.sampling.acceptance(depth) for depth in range(1, len(draft_logits) + 1)]
        return build_tree(draft_logits, tree_budget, root_token_id, policy, acceptance, self.sampling.randomness)

    def commit_path(self, path, hidden_states):
        positions = self.root_position + torch.arange(len(path), device=self.root_position.device)
        self.context = torch.cat([self.context, hidden_states], dim=1)
        self.context_positions = torch.cat([self.context_positions, positions], dim=1)
        self.root_position = self.root_position + len(path)

    def draft(self, root_token_id: int) -> torch.Tensor:
        """One drafter forward: the logits of the tokens at depths 1 to block_size - 1, `[depth, V]`."""
        device = self.drafter.device
        block = torch.full((1, self.block_size), self.mask_token_id, device=self.root_position.device)
        block[0, 0] = root_token_id
        embeds = embed_without_norm(self.embed, block)
        block_positions = self.root_position + torch.arange(self.block_size, device=block.device)
        self.cache.set_previous_accepted_tokens(self.context.shape[1])
        outputs = self.drafter(
            noise_embeds=embeds.to(device=device, dtype=self.drafter.dtype),
            context_hidden_states=self.context.to(device=device, dtype=self.drafter.dtype),
            position_ids=torch.cat([self.context_positions, block_positions], dim=1).to(device),
            cache=self.cache,
        )
        self.cache.crop(-self.block_size)
        self.context, self.context_positions = self.context[:, :0], self.context_positions[:, :0]
        # slot k predicts token k; slot 0 is the root itself
        return self.head(outputs.last_hidden_state[:, 1:].to(device=embeds.device, dtype=embeds.dtype))[0]


def embed_without_norm(embedding: nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
    """Embed as DFlash drafters are trained: without the normalisation that Muse Glimmer's embedding adds."""
    if hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(token_ids, embedding.weight, embedding.padding_idx)
    return embedding(token_ids)


def check_block(block_size, mask_token_id, target_layer_ids, source: str) -> None:
    """Raise a ValueError if one of the fields without which no block can be drafted is missing or impossible.

    Args:
        source: what the fields were read from.
    """
    if mask_token_id is None:
        raise ValueError(f"{source}: the drafter's config lacks dflash_config.mask_token_id.")
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(f"{source}: the drafter's config lacks a block_size of at least 2 (it says {block_size!r}).")
    if not target_layer_ids:
        raise ValueError(
            f"{source}: the drafter's config has neither dflash_config.target_layer_ids nor num_target_layers."
        )


def check_drafter(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise a ValueError if the drafter's config does not fit the target, naming the field."""
    config, text_config = drafter.config, target.config.get_text_config(decoder=True)
    check_block(config.block_size, config.mask_token_id, config.target_layer_ids, "assistant_model")
    num_layers = text_config.num_hidden_layers
    trained_for = getattr(config, "num_target_layers", None)
    vocab_size = getattr(config, "vocab_size", None)
    outside = [layer for layer in config.target_layer_ids if not 0 <= layer < num_layers]
    if config.hidden_size != text_config.hidden_size:
        problem = f"hidden_size is {config.hidden_size}, the target's {text_config.hidden_size}"
    elif outside:
        problem = f"target_layer_ids {outside} are outside the target's {num_layers} layers"
    elif trained_for not in (None, num_layers):
        problem = f"num_target_layers is {trained_for}, but the target has {num_layers}"
    elif vocab_size not in (None, text_config.vocab_size):
        problem = f"vocab_size is {vocab_size}, the target's {text_config.vocab_size}"
    elif not 0 <= config.mask_token_id < target.get_input_embeddings().weight.shape[0]:
        problem = f"mask_token_id {config.mask_token_id} is outside the target's embedding"
    elif target.get_output_embeddings() is None:
        problem = "head is the target's, which has none"
    else:
        return
    raise ValueError(f"assistant_model: this drafter was made for another target: its {problem}.")
