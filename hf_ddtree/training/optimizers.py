"""The optimizers and their learning rate."""

import math

import torch

from .config import TrainConfig

FINAL_RATE = 0.03  # of the peak, at the end of the cosine


def make_optimizers(drafter: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the other parameters, which are the norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    others = [p for p in drafter.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine that ends at `FINAL_RATE` of the peak.

    Args:
        step: the number of the step, from 0.
        config: gives the peak, the length of the warm-up and the number of steps.
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    through = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * through))
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
