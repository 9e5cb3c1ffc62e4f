"""What the drafter is trained on: many blocks per sequence, drafted in one forward."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.dflash import embed_without_norm
from .data import Sequence

IGNORED = -100


@dataclass
class Batch:
    """A padded batch of sequences and the blocks to predict in it.

    Args:
        tokens: `[B, L]` int64, right-padded with 0.
        valid: `[B, L]` bool, False at padding.
        anchors: `[B, A]` int64, the index of the root of each block.
        labels: `[B, A, depth]` int64, the tokens after the root. `IGNORED` past the end and in unused blocks.
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with all tensors on a device."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


def make_batch(sequences: list[Sequence], n_anchors: int, block_size: int, generator: torch.Generator | None) -> Batch:
    """Pad sequences and choose the roots of up to `n_anchors` blocks in each answer.

    A root is a generated token with at least one successor. Shorter answers leave blocks unused.

    Args:
        sequences: the rows of the batch.
        n_anchors: blocks per sequence.
        block_size: tokens per block, root included.
        generator: chooses the roots. None takes the first ones in order.
    """
    length = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.zeros(len(sequences), length + block_size, dtype=torch.long, device="cpu")
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    anchors = torch.zeros(len(sequences), n_anchors, dtype=torch.long, device="cpu")
    used = torch.zeros_like(anchors, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        n = len(sequence.tokens)
        tokens[row, :n], valid[row, :n] = sequence.tokens, True
        candidates = torch.arange(sequence.prompt_length, n - 1, dtype=torch.long, device="cpu")
        if generator is not None:
            order = torch.randperm(len(candidates), generator=generator, dtype=torch.long, device="cpu")
            candidates = candidates[order]
        chosen = candidates[:n_anchors]
        anchors[row, : len(chosen)], used[row, : len(chosen)] = chosen, True
    index = anchors[..., None] + torch.arange(1, block_size, dtype=torch.long, device="cpu")
    rows = torch.arange(len(sequences), dtype=torch.long, device="cpu")[:, None, None]
    labels = tokens[rows, index].masked_fill(~(valid[rows, index] & used[..., None]), IGNORED)
    return Batch(tokens[:, :length], valid[:, :length], anchors, labels)


@torch.no_grad()
def target_states(target: PreTrainedModel, batch: Batch, layer_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's hidden states of all tokens of a batch.

    Args:
        target: the model to run.
        batch: on the target's device.
        layer_ids: the layers to tap, from 0.

    Returns:
        The tapped states `[B, L, taps * H]`, and the states `[B, L, H]` that the target's head reads.
    """
    taps = [layer + 1 for layer in layer_ids]
    outputs = target.base_model(
        input_ids=batch.tokens, attention_mask=batch.valid.long(), output_hidden_states=taps, use_cache=False
    )
    states = torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1)
    return states, outputs.last_hidden_state


def draft_blocks(
    drafter: nn.Module, config: PreTrainedConfig, embedding: nn.Embedding, batch: Batch, context: torch.Tensor
) -> torch.Tensor:
    """Run the drafter over all blocks of a batch at once.

    Each block sees the context before its root and itself. A mask hides the other blocks of the sequence.

    Args:
        drafter: a `DFlashDraftModel`, possibly wrapped for distributed training.
        config: the drafter's config, with a block size and a mask token.
        embedding: the target's embedding.
        batch: the blocks.
        context: `[B, L, taps * H]`, the tapped states in the drafter's scale.

    Returns:
        `[B, A, depth, H]`. Row k - 1 of a block predicts the k-th token after the root.
    """
    n_batch, n_blocks = batch.anchors.shape
    size, length, device = config.block_size, context.shape[1], context.device
    block_ids = torch.full((n_batch, n_blocks, size), config.mask_token_id, dtype=torch.long, device=device)
    block_ids[..., 0] = batch.tokens.gather(1, batch.anchors)
    block_positions = (batch.anchors[..., None] + torch.arange(size, dtype=torch.long, device=device)).flatten(1)
    context_positions = torch.arange(length, dtype=torch.long, device=device).expand(n_batch, -1)
    states = drafter(
        noise_embeds=embed_without_norm(embedding, block_ids.flatten(1)).to(context.dtype),
        context_hidden_states=context,
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=_block_mask(batch.anchors, size, length, context.dtype),
    ).last_hidden_state
    return states.unflatten(1, (n_blocks, size))[:, :, 1:]


def _block_mask(anchors: torch.Tensor, block_size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of blocks that see the context before their root and themselves.

    Args:
        anchors: `[B, A]` int64, the index of the root of each block.
        block_size: tokens per block, root included.
        length: L, the tokens of the context.
        dtype: of the mask.

    Returns:
        `[B, 1, A * block_size, L + A * block_size]`, 0 where a token is visible.
    """
    n_batch, n_blocks = anchors.shape
    roots = anchors.repeat_interleave(block_size, dim=1)[..., None]
    sees_context = torch.arange(length, dtype=torch.long, device=anchors.device) < roots
    block_of = torch.arange(n_blocks, dtype=torch.long, device=anchors.device).repeat_interleave(block_size)
    sees_block = (block_of[:, None] == block_of).expand(n_batch, -1, -1)
    visible = torch.cat([sees_context, sees_block], dim=2)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
