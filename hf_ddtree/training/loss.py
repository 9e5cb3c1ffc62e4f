"""The training loss: position-weighted cross-entropy and divergence from the target, over part of the vocabulary."""

from typing import Any

import torch
from torch.nn import functional as F

from .blocks import IGNORED

MAX_LOGITS = 2**21  # elements that are in memory at once


def candidate_tokens(
    labels: torch.Tensor,
    frequent: torch.Tensor,
    n_negatives: int,
    vocab_size: int,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the tokens that a sampled softmax runs over: all labels, the frequent tokens and random tokens.

    Args:
        labels: int64 of any shape, with `IGNORED` entries.
        frequent: `[F]` token ids that are always included.
        n_negatives: how many tokens to draw at random. If it is 0 or less and `frequent` is empty, the softmax runs
            over the whole vocabulary.
        vocab_size: V.
        generator: draws the random tokens. It must be a CPU generator.

    Returns:
        `[C]` int64 on the device of `labels`, sorted and without duplicates.
    """
    if n_negatives <= 0 and len(frequent) == 0:
        return torch.arange(vocab_size, dtype=torch.long, device=labels.device)
    shape = (max(0, n_negatives),)
    negatives = torch.randint(vocab_size, shape, generator=generator, dtype=torch.long, device="cpu")
    kept = [labels[labels != IGNORED], frequent.to(labels.device), negatives.to(labels.device)]
    return torch.cat(kept).unique()


def draft_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    head: torch.Tensor,
    candidates: torch.Tensor,
    decay: float,
    target_states: torch.Tensor | None = None,
    kl_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sum_k w_k [(1 - a) CE_k + a KL_k] / sum_k w_k with w_k = exp(-(k - 1) / decay).

    The sums run over all predicted tokens, and k is the position of a token in its block, from 1. CE_k is
    -log q_k(label) and KL_k is KL(p_k || q_k). Both q and p are restricted to the candidates.

    Args:
        states: `[.., depth, H]`, the drafter's hidden states.
        labels: `[.., depth]` int64, `IGNORED` where there is nothing to predict.
        head: `[V, H]`, the target's head, frozen.
        candidates: `[C]` int64, sorted token ids that include every label.
        decay: in positions.
        target_states: `[.., depth, H]`, what the target's head reads at the same positions. It is required if
            `kl_weight` is above 0.
        kl_weight: a, from 0 to 1.

    Returns:
        The loss, and `[depth, 2]`: the number of right predictions and of all predictions at each position.
    """
    depth = labels.shape[-1]
    mask = labels != IGNORED
    level = torch.arange(depth, dtype=torch.long, device=labels.device).expand_as(labels)[mask]
    weights = torch.exp(-level.float() / decay)
    head = head[candidates]
    predicted, wanted = states[mask], torch.searchsorted(candidates, labels[mask])
    teacher = None if target_states is None or kl_weight <= 0 else target_states[mask]
    losses, right = _RowLosses.apply(predicted, wanted, teacher, head, weights / weights.sum(), kl_weight)
    counts = torch.zeros(depth, 2, dtype=torch.float32, device=labels.device)
    counts.index_add_(0, level, torch.stack([right, torch.ones_like(right)], dim=1))
    return losses.sum(), counts


class _RowLosses(torch.autograd.Function):
    """Compute w [(1 - a) CE + a KL] per row.

    The gradient by the logits is w (q - t) with t = (1 - a) 1[label] + a p. The forward pass computes it together with
    the loss, some rows at a time. The logits of all rows fit into no cache, and of a large vocabulary into no GPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        predicted: torch.Tensor,  # [R, H]
        wanted: torch.Tensor,  # [R] int64, as indices into the head
        teacher: torch.Tensor | None,  # [R, H]
        head: torch.Tensor,  # [C, H]
        weights: torch.Tensor,  # [R]
        kl_weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(predicted)
        losses, right = (torch.empty_like(wanted, dtype=torch.float32) for _ in range(2))
        every_row = torch.arange(len(wanted), dtype=torch.long, device=wanted.device)
        for rows in every_row.split(max(1, MAX_LOGITS // len(head))):
            label, weight = wanted[rows, None], weights[rows, None]
            logits = F.linear(predicted[rows], head).float()
            right[rows] = (logits.argmax(-1, keepdim=True) == label).float()[:, 0]
            log_q = logits.log_softmax(-1)
            loss = (kl_weight - 1) * log_q.gather(1, label)[:, 0]
            by_logits = log_q.exp().scatter_add_(1, label, torch.full_like(weight, kl_weight - 1))
            if teacher is not None:
                log_p = F.linear(teacher[rows], head).float().log_softmax(-1)
                p = log_p.exp()
                loss += kl_weight * (p * (log_p - log_q)).sum(-1)
                by_logits.sub_(p, alpha=kl_weight)
            losses[rows] = loss * weight[:, 0]
            gradient[rows] = F.linear(by_logits.mul_(weight), head.T).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(ctx: Any, by_losses: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * by_losses[:, None].to(gradient.dtype), None, None, None, None, None
