"""Drafting with a DFlash block-diffusion model: the distributions of a whole block in one forward."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DFlashCache

from .._transformers import empty_cache
from ..build import build_tree
from .base import Drafter
from .context import Context
from .q import DraftSampling
from .speculators import SpeculatorsDFlashModel


class DFlashDrafter(Drafter):
    """Drafts a block from the target's hidden states, and builds the best-first tree of its marginals.

    Args:
        model: a `DFlashDraftModel`, or transformers' own `MuseGlimmerAssistantModel`. It must have passed
            `checks.check_dflash`.
        target: the model that generates. It lends its embedding and its head.
        sampling: how to choose children.
        context: what the model has read in earlier calls.
    """

    sampling: DraftSampling

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        sampling: DraftSampling,
        context: Context | None = None,
    ):
        config = model.config
        self.model, self.sampling = model, sampling
        has_own_head = isinstance(model, SpeculatorsDFlashModel)
        self.embed = model.embed_tokens if has_own_head else target.get_input_embeddings()
        self.head = model.logits if has_own_head else target.get_output_embeddings()
        # slot k predicts token k, and slot 0 is the root itself, unless the config says that the root's slot predicts
        self.first_slot = 0 if has_own_head and config.sample_from_anchor else 1
        self.taps = tuple(layer + 1 for layer in config.target_layer_ids)
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.context = context or Context()
        if self.context.cache is None:
            self.context.cache = empty_cache(DFlashCache, config)
            self.context.cache.activate_past_recording()
        self.root_position = torch.zeros(1, 1, dtype=torch.long, device="cpu")

    def prefill(self, hidden_states, position_ids):
        """Take in the target's states of the prompt."""
        self._read(hidden_states, position_ids, first=self.context.n_cached)
        self.root_position = position_ids[:, -1:] + 1

    def draft(self, input_ids, tree_budget, max_depth):
        """Return the tree of the next round."""
        root_token_id = int(input_ids[0, -1])
        draft_logits = self.sampling.warp(self.draft_logits(root_token_id)[:max_depth])
        policy = self.sampling.policy
        if not policy.drawn:
            return build_tree(draft_logits, tree_budget, root_token_id)
        acceptance = [self.sampling.acceptance(depth) for depth in range(1, len(draft_logits) + 1)]
        return build_tree(draft_logits, tree_budget, root_token_id, policy, acceptance, self.sampling.randomness)

    def commit(self, path, hidden_states):
        """Take in the accepted path of a round."""
        positions = self.root_position + torch.arange(len(path), dtype=torch.long, device=self.root_position.device)
        self._read(hidden_states, positions, first=self.context.rows[-1] + 1)
        self.root_position = self.root_position + len(path)

    def _read(self, states: torch.Tensor, positions: torch.Tensor, first: int) -> None:
        """Add the states of consecutive tokens, of which the first one has the index `first` in the text."""
        device, dtype = self.model.device, self.model.dtype
        self.context.pending.append((states.to(device=device, dtype=dtype), positions.to(device)))
        self.context.rows += range(first, first + states.shape[1])

    def draft_logits(self, root_token_id: int) -> torch.Tensor:
        """Run one forward of the model: the logits of the tokens at depths 1 to block_size - 1, `[depth, V]`.

        Args:
            root_token_id: the token of the root.
        """
        device, cache = self.model.device, self.context.cache
        block = self.root_position.new_full((1, self.block_size), self.mask_token_id)
        block[0, 0] = root_token_id
        embeds = embed_without_norm(self.embed, block)
        block_positions = self.root_position + torch.arange(self.block_size, dtype=torch.long, device=block.device)
        states, positions = (torch.cat(parts, dim=1) for parts in zip(*self.context.pending, strict=True))
        cache.set_previous_accepted_tokens(states.shape[1])
        outputs = self.model(
            noise_embeds=embeds.to(device=device, dtype=self.model.dtype),
            context_hidden_states=states,
            position_ids=torch.cat([positions, block_positions.to(device)], dim=1),
            cache=cache,
        )
        cache.crop(-self.block_size)
        self.context.pending.clear()
        states = outputs.last_hidden_state[:, self.first_slot :]
        return self.head(states.to(device=embeds.device, dtype=embeds.dtype))[0]


def embed_without_norm(embedding: nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
    """Embed tokens as DFlash drafters are trained: without the normalisation that Muse Glimmer's embedding adds.

    Args:
        embedding: the target's input embedding.
        token_ids: `[B, n]` int64.
    """
    if hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(token_ids, embedding.weight, embedding.padding_idx)
    return embedding(token_ids)
