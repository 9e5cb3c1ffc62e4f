"""The measured C_verify, kept in the user's cache directory from one process to the next."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..files import user_cache, write_then_rename
from ..target.attention import TreeForward
from ..target.timing import fingerprint, time_verification
from .cost import VerifyCost

logger = logging.getLogger(__name__)


def verify_cost(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> VerifyCost:
    """Return C_verify of a model on this machine, from the cache directory or measured now.

    Args:
        model: the target.
        device: the device of its inputs.
        attention: the attention backend.
    """
    path = _path(model, device, attention)
    try:
        if path is not None:
            return VerifyCost(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass  # there is no file, or it is unreadable
    logger.warning("Measuring what verifying trees costs on this machine. This happens once.")
    times = time_verification(model, device, attention)
    cost = VerifyCost(times.sizes, times.lengths, times.seconds)
    if path is not None:
        try:
            write_then_rename(path, lambda file: file.write_text(json.dumps(asdict(cost)), encoding="utf-8"))
        except OSError as error:
            logger.warning("The measured costs could not be stored for later: %s", error)
    return cost


def _path(model: PreTrainedModel, device: torch.device, attention: type[TreeForward]) -> Path | None:
    """Return the file of this model's costs, or None if there is no home directory."""
    try:
        return user_cache() / "verify-cost" / f"{fingerprint(model, device, attention)}.json"
    except RuntimeError:
        return None
