"""From sequences to what the drafter is trained on: many blocks per sequence in one forward."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..drafters.dflash import embed_without_norm
from .data import Sequence

IGNORED = -100


@dataclass
class Batch:
    """A padded batch of sequences and the blocks to predict in it.

    Args:
        tokens: `[B, L]` int64, right-padded with 0.
        valid: `[B, L]` bool, False at padding.
        anchors: `[B, A]` int64, the index of each block's root.
        labels: `[B, A, depth]` int64, the tokens after the root; `IGNORED` past the end and in unused blocks.
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor

    def to(self, device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


def make_batch(sequences: list[Sequence], n_anchors: int, block_size: int, generator: torch.Generator | None) -> Batch:
    """Pad sequences and choose the roots of `n_anchors` blocks in each answer.

    A root is a generated token with at least one successor. Shorter answers leave blocks unused.

    Args:
        generator: chooses the roots; None takes the first ones in order.
    """
    length = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.zeros(len(sequences), length + block_size, dtype=torch.long)
    valid = torch.zeros(tokens.shape, dtype=torch.bool)
    anchors = torch.zeros(len(sequences), n_anchors, dtype=torch.long)
    used = torch.zeros(anchors.shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        n = len(sequence.tokens)
        tokens[row, :n], valid[row, :n] = sequence.tokens, True
        candidates = torch.arange(sequence.prompt_length, n - 1)
        if generator is not None:
            candidates = candidates[torch.randperm(len(candidates), generator=generator)]
        chosen = candidates[:n_anchors]
        anchors[row, : len(chosen)], used[row, : len(chosen)] = chosen, True
    index = anchors[..., None] + torch.arange(1, block_size)
    rows = torch.arange(len(sequences))[:, None, None]
    labels = tokens[rows, index].masked_fill(~(valid[rows, index] & used[..., None]), IGNORED)
    return Batch(tokens[:, :length], valid[:, :length], anchors, labels)


@torch.no_grad()
def target_states(target: PreTrainedModel, batch: Batch, layer_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tapped hidden states, `[B, L, taps * H]`, and the states the head reads, `[B, L, H]`."""
    taps = [layer + 1 for layer in layer_ids]
    outputs = target.base_model(
        input_ids=batch.tokens, attention_mask=batch.valid.long(), output_hidden_states=taps, use_cache=False
    )
    states = torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1)
    return states, outputs.last_hidden_state


def draft_blocks(drafter, config, embedding, batch: Batch, context: torch.Tensor) -> torch.Tensor:
    """The drafter's states for all blocks at once: `[B, A, depth, H]`, where row k-1 predicts the root's k-th successor.

    Each block sees the context before its root and itself; a mask keeps the blocks of a sequence apart.

    Args:
        drafter: the model, possibly wrapped for distributed training.
        config: its config.
        embedding: the target's.
        context: `[B, L, taps * H]`.
    """
    n_batch, n_blocks = batch.anchors.shape
    size, length, device = config.block_size, context.shape[1], context.device
    block_ids = torch.full((n_batch, n_blocks, size), config.mask_token_id, device=device)
    block_ids[..., 0] = batch.tokens.gather(1, batch.anchors)
    embeds = embed_without_norm(embedding, block_ids.flatten(1)).to(context.dtype)
    block_positions = (batch.anchors[..., None] + torch.arange(size, device=device)).flatten(1)
    context_positions = torch.arange(length, device=device).expand(n_batch, -1)

    roots = batch.anchors.repeat_interleave(size, dim=1)[..., None]
    sees_context = torch.arange(length, device=device) < roots
    block_of = torch.arange(n_blocks, device=device).repeat_interleave(size)
    sees_block = (block_of[:, None] == block_of).expand(n_batch, -1, -1)
    visible = torch.cat([sees_context, sees_block], dim=2)[:, None]
    mask = torch.zeros(visible.shape, dtype=context.dtype, device=device)
    mask.masked_fill_(~visible, torch.finfo(context.dtype).min)
    states = drafter(
        noise_embeds=embeds,
        context_hidden_states=context,
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=mask,
    ).last_hidden_state
    return states.unflatten(1, (n_blocks, size))[:, :, 1:]
