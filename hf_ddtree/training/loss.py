"""The training loss: position-decayed cross-entropy and divergence from the target, over part of the vocabulary."""

import torch
from torch.nn import functional as F

from .blocks import IGNORED


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
    rows = head[candidates]
    logits = F.linear(states[mask], rows).float()
    wanted = torch.searchsorted(candidates, labels[mask])
    losses = F.cross_entropy(logits, wanted, reduction="none")
    if kl_weight > 0:
        with torch.no_grad():
            log_p = F.linear(target_states[mask], rows).float().log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1)
        losses = (1 - kl_weight) * losses + kl_weight * divergence
    right = (logits.argmax(-1) == wanted).float()
    counts = torch.zeros(depth, 2, device=labels.device)
    counts.index_add_(0, level, torch.stack([right, torch.ones_like(right)], dim=1))
    return (weights * losses).sum() / weights.sum(), counts
