"""Scale the target's hidden states for training, and fold the scale into the weights of the finished drafter.

The states of deep layers are an order of magnitude larger than those of early layers, and would dominate the sum that
the drafter's `fc` computes. During training every tapped layer is scaled to a root mean square of about 1. The finished
drafter has the scale in `fc`, so it takes the states as the target returns them.
"""

import torch
from transformers import PreTrainedModel

from ..drafters.dflash_model import DFlashDraftModel
from .blocks import make_batch, target_states
from .data import Sequence


def state_scale(target: PreTrainedModel, layer_ids: list[int], sequences: list[Sequence]) -> torch.Tensor:
    """Return the factors that bring the states of every tapped layer to a typical root mean square of 1.

    Args:
        target: the model whose states are read.
        layer_ids: the layers to read, from 0.
        sequences: the sample to take the median over. A mean would follow the first token of a sequence, whose states
            are far larger than the others.

    Returns:
        `[taps * H]` in the target's dtype.
    """
    batch = make_batch(sequences, n_anchors=1, block_size=2, generator=None).to(target.device)
    states, _ = target_states(target, batch, layer_ids)
    states = states[batch.valid].unflatten(-1, (len(layer_ids), -1)).float()
    typical = states.square().mean(-1).sqrt().median(0).values
    return (1 / typical).repeat_interleave(states.shape[-1]).to(target.dtype)


def finished_drafter(drafter: DFlashDraftModel, scale: torch.Tensor) -> DFlashDraftModel:
    """Return a copy of a drafter in evaluation mode that takes unscaled hidden states.

    Args:
        drafter: trained on scaled hidden states.
        scale: `[taps * H]`, the result of `state_scale`.
    """
    finished = DFlashDraftModel(drafter.config)
    finished.load_state_dict(drafter.state_dict())
    finished.fc.weight.data *= scale.to(finished.fc.weight)
    return finished.eval()


def remove_scale(drafter: DFlashDraftModel, scale: torch.Tensor) -> None:
    """Make a drafter that takes unscaled hidden states take scaled ones, in place.

    Args:
        drafter: its `fc` is changed.
        scale: `[taps * H]`, the result of `state_scale`.
    """
    drafter.fc.weight.data /= scale.to(drafter.fc.weight)
