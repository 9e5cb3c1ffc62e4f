"""The training loss: position-decayed cross-entropy and divergence from the target, over part of the vocabulary."""

import torch
from torch.nn import functional as F

from .blocks import IGNORED

MAX_LOGITS = 2**21  # at once, in elements


def candidate_tokens(
    labels: torch.Tensor,
    frequent: torch.Tensor,
    n_negatives: int,
    vocab_size: int,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The tokens a sampled softmax runs over, sorted: all labels, frequent tokens, and random others.

    Args:
        labels: any shape, with `IGNORED` entries.
        frequent: `[F]` token ids that are always among them.
        n_negatives: how many to draw at random; 0 or less together with an empty `frequent` means all tokens.
        generator: draws them, on the CPU.
    """
    if n_negatives <= 0 and len(frequent) == 0:
        return torch.arange(vocab_size, device=labels.device)
    negatives = torch.randint(vocab_size, (max(0, n_negatives),), generator=generator).to(labels.device)
    return torch.cat([labels[labels != IGNORED], frequent.to(labels.device), negatives]).unique()


def draft_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    head: torch.Tensor,
    candidates: torch.Tensor,
    decay: float,
    target_states: torch.Tensor | None = None,
    kl_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_k w_k [(1 - a) CE_k + a KL_k] / sum_k w_k with w_k = exp(-(k - 1) / decay), over all predicted tokens.

    CE_k = -log q_k(label) and KL_k = KL(p_k || q_k), q and p restricted to the candidates.

    Args:
        states: `[.., depth, H]`, the drafter's.
        labels: `[.., depth]`, `IGNORED` where there is nothing to predict.
        head: `[V, H]`, the target's, frozen.
        candidates: `[C]` sorted token ids that hold every label.
        decay: in positions.
        target_states: `[.., depth, H]`, what the target's head reads at the same positions; needed for `kl_weight` > 0.
        kl_weight: a.

    Returns:
        The loss, and `[depth, 2]`: how many predictions were right and how many were made, per position.
    """
    depth = labels.shape[-1]
    mask = labels != IGNORED
    level = torch.arange(depth, device=labels.device).expand_as(labels)[mask]
    weights = torch.exp(-level / decay)
    head = head[candidates]
    predicted, wanted = states[mask], torch.searchsorted(candidates, labels[mask])
    teacher = target_states[mask] if kl_weight > 0 else None
    losses, right = _RowLosses.apply(predicted, wanted, teacher, head, weights / weights.sum(), kl_weight)
    counts = torch.zeros(depth, 2, device=labels.device)
    counts.index_add_(0, level, torch.stack([right, torch.ones_like(right)], dim=1))
    return losses.sum(), counts


class _RowLosses(torch.autograd.Function):
    """w [(1 - a) CE + a KL] per row; its gradient by the logits is w (q - t) with t = (1 - a) 1[label] + a p.

    The gradient is taken in the forward pass, some rows at a time: the logits of all rows would fit no cache and, with a
    large vocabulary, no GPU.
    """

    @staticmethod
    def forward(ctx, predicted, wanted, teacher, head, weights, kl_weight):
        gradient = torch.empty_like(predicted)
        losses, right = (torch.empty(len(wanted), device=wanted.device) for _ in range(2))
        for rows in torch.arange(len(wanted), device=wanted.device).split(max(1, MAX_LOGITS // len(head))):
            label, weight = wanted[rows, None], weights[rows, None]
            logits = F.linear(predicted[rows], head).float()
            right[rows] = (logits.argmax(-1, keepdim=True) == label).float()[:, 0]
            log_q = logits.log_softmax(-1)
            loss = (kl_weight - 1) * log_q.gather(1, label)[:, 0]
            by_logits = log_q.exp().scatter_add_(1, label, torch.full_like(weight, kl_weight - 1))
            if kl_weight > 0:
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
    def backward(ctx, by_losses, _):
        (gradient,) = ctx.saved_tensors
        return gradient * by_losses[:, None].to(gradient.dtype), None, None, None, None, None
