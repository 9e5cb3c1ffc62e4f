"""The held-out acceptance at every checkpoint, and keeping the drafter that has the best one."""

from typing import Any

import torch

from .acceptance import CHAIN, held_out_tokens_per_round
from .card import write_card, write_log
from .run import Run
from .scale import finished_drafter
from .step import Tally

DECIDING_BUDGET = 16  # the best drafter is the one with the most tokens per round at this budget
HELD_OUT_BUDGETS = (CHAIN, DECIDING_BUDGET, 64)


def keep_best(run: Run, tally: Tally) -> dict[str, Any]:
    """Compute the held-out acceptance, log it, and save the drafter if it is the best one so far.

    The drafter is saved in the z-lab layout, in bf16 and with a card. The log is written in any case.

    Args:
        run: its progress gets the new entry of the log.
        tally: the batches since the last checkpoint.

    Returns:
        The new entry of the log.
    """
    finished = finished_drafter(run.drafter, run.scale).to(device=run.target.device, dtype=run.target.dtype)
    figures = held_out_tokens_per_round(finished, run.target, run.held_out, HELD_OUT_BUDGETS)
    progress = run.progress
    entry = {
        "step": progress.step,
        "seconds": round(progress.seconds),
        "loss": round(tally.mean_loss(), 4),
        "accuracy": [round(accuracy, 3) for accuracy in tally.accuracy()],
        "tokens_per_round": {("chain" if b == CHAIN else str(b)): round(value, 3) for b, value in figures.items()},
    }
    progress.log.append(entry)
    if figures[DECIDING_BUDGET] > progress.best:
        progress.best = figures[DECIDING_BUDGET]
        finished.to(torch.bfloat16).save_pretrained(run.config.output)
        write_card(run.target, run.config, progress)
    write_log(run.config, progress)
    return entry
