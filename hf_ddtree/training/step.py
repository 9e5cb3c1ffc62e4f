"""One training step: the loss of a batch, and what is counted until the next checkpoint."""

from dataclasses import dataclass, field

import torch

from .blocks import Batch, draft_blocks, make_batch, target_states
from .data import Sequence
from .features import read_features
from .loss import candidate_tokens, draft_loss
from .run import Run


@dataclass
class Tally:
    """The losses and the right predictions of several batches.

    Args:
        losses: one loss per batch.
        counts: `[depth, 2]`, the number of right predictions and of all predictions at each position of a block.
    """

    losses: list[float] = field(default_factory=list)
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def add(self, loss: torch.Tensor, counts: torch.Tensor) -> None:
        """Count one batch. See `batch_loss` for both arguments."""
        self.losses.append(float(loss.detach()))
        self.counts = self.counts + counts

    def mean_loss(self) -> float:
        """Return the mean loss of all batches."""
        return sum(self.losses) / len(self.losses)

    def accuracy(self) -> list[float]:
        """Return the fraction of right predictions at each position that was predicted at least once."""
        return [right / made for right, made in self.counts.tolist() if made]


def batch_loss(run: Run, sequences: list[Sequence], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training loss of a batch, a scalar with gradient, and the counts of `draft_loss`.

    Args:
        run: the networks and the settings.
        sequences: the rows of the batch.
        generator: chooses the blocks and the random tokens of the sampled softmax.
    """
    config, target = run.config, run.target
    batch = make_batch(sequences, config.anchors, config.block_size, generator).to(run.accelerator.device)
    context, last = _states(run, batch, sequences)
    context = context * run.scale
    head = target.get_output_embeddings().weight
    candidates = candidate_tokens(batch.labels, run.frequent, config.negatives, head.shape[0], generator)
    teacher = teacher_states(batch, last) if config.kl_weight > 0 else None
    with run.accelerator.autocast():
        predicted = draft_blocks(run.model, run.drafter.config, target.get_input_embeddings(), batch, context)
        return draft_loss(predicted, batch.labels, head, candidates, config.decay, teacher, config.kl_weight)


def _states(run: Run, batch: Batch, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tapped states and those that the head reads, from disk if the run stores them."""
    if run.config.features is None:
        return target_states(run.target, batch, run.layer_ids)
    tapped, last = read_features(run.config.features, sequences)
    return tapped.to(batch.tokens.device), last.to(batch.tokens.device)


def teacher_states(batch: Batch, last: torch.Tensor) -> torch.Tensor:
    """Return `[B, A, depth, H]`: the states from which the target's head predicts the labels.

    Args:
        batch: its blocks.
        last: `[B, L, H]`, the states that the head reads.
    """
    # the state that predicts the k-th token after the root stands k - 1 tokens after the root
    depth, device = batch.labels.shape[-1], batch.anchors.device
    index = batch.anchors[..., None] + torch.arange(depth, dtype=torch.long, device=device)
    rows = torch.arange(len(last), dtype=torch.long, device=device)[:, None, None]
    return last[rows, index.clamp(max=last.shape[1] - 1)]
