"""Drafting with a DFlash block-diffusion model: the distributions of a whole block in one forward."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DFlashCache

from ..tree import build_tree
from .base import DraftSampling, TreeCandidateGenerator
from .dflash_model import check_block
from .speculators import SpeculatorsDFlashModel


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
        own = isinstance(drafter, SpeculatorsDFlashModel)
        self.embed = drafter.embed_tokens if own else target.get_input_embeddings()
        self.head = drafter.logits if own else target.get_output_embeddings()
        # slot k predicts token k, and slot 0 is the root itself, unless the root's slot predicts too
        self.first_slot = 0 if own and config.sample_from_anchor else 1
        self.sampling = sampling
        self.tapped_states = tuple(layer + 1 for layer in config.target_layer_ids)
        self.block_size = config.block_size
        self.mask_token_id = config.mask_token_id
        self.cache = DFlashCache(config=config)
        self.cache.activate_past_recording()
        self.root_position = None
        self.context: list[tuple[torch.Tensor, torch.Tensor]] = []  # states and positions that are not in the cache yet

    def prefill(self, hidden_states, position_ids):
        self.context.append((hidden_states, position_ids))
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
        self.context.append((hidden_states, positions))
        self.root_position = self.root_position + len(path)

    def draft(self, root_token_id: int) -> torch.Tensor:
        """One drafter forward: the logits of the tokens at depths 1 to block_size - 1, `[depth, V]`."""
        device = self.drafter.device
        block = torch.full((1, self.block_size), self.mask_token_id, device=self.root_position.device)
        block[0, 0] = root_token_id
        embeds = embed_without_norm(self.embed, block)
        block_positions = self.root_position + torch.arange(self.block_size, device=block.device)
        context, context_positions = (torch.cat(parts, dim=1) for parts in zip(*self.context))
        self.cache.set_previous_accepted_tokens(context.shape[1])
        outputs = self.drafter(
            noise_embeds=embeds.to(device=device, dtype=self.drafter.dtype),
            context_hidden_states=context.to(device=device, dtype=self.drafter.dtype),
            position_ids=torch.cat([context_positions, block_positions], dim=1).to(device),
            cache=self.cache,
        )
        self.cache.crop(-self.block_size)
        self.context.clear()
        states = outputs.last_hidden_state[:, self.first_slot :]
        return self.head(states.to(device=embeds.device, dtype=embeds.dtype))[0]


def embed_without_norm(embedding: nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
    """Embed as DFlash drafters are trained: without the normalisation that Muse Glimmer's embedding adds."""
    if hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(token_ids, embedding.weight, embedding.padding_idx)
    return embedding(token_ids)


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
