"""The training loop of a DFlash drafter."""

import json
import time

from tqdm import tqdm
from transformers import PreTrainedModel

from .config import TrainConfig
from .held_out import keep_best
from .optimizers import learning_rate, set_learning_rate
from .run import Run, start_run
from .step import Tally, batch_loss

MAX_GRADIENT_NORM = 1.0


def train(target: PreTrainedModel, config: TrainConfig) -> None:
    """Train a drafter for `target`, or resume the run that left a checkpoint in `config.output`.

    Every step is a function of the seed and of its number, so a resumed run gives the result of a run without a stop.
    The drafter with the most held-out tokens per round is kept in `config.output`, in the z-lab layout, with a card and
    a log.

    Args:
        target: the model to draft for, in the dtype that it should run in. It is frozen.
        config: the settings.

    Raises:
        ValueError: if the settings do not fit the data, the checkpoint, the stored states or the initial drafter.
    """
    run = start_run(target, config)
    tally = Tally()
    for step in _remaining_steps(run):
        set_learning_rate(run.optimizers, learning_rate(step, config))
        for sequences, generator in run.order.step_batches(step):
            loss, counts = batch_loss(run, sequences, generator)
            run.accelerator.backward(loss / config.accumulate)
            tally.add(loss, counts)
        _update_weights(run)
        done = step + 1
        if done % config.evaluate_every == 0 or done == config.steps:
            _finish_part(run, done, tally)
            tally = Tally()


def _remaining_steps(run: Run) -> tqdm:
    first, end = run.progress.step, run.config.steps
    is_quiet = not run.accelerator.is_main_process
    return tqdm(range(first, end), initial=first, total=end, unit="step", disable=is_quiet)


def _update_weights(run: Run) -> None:
    run.accelerator.clip_grad_norm_(run.drafter.parameters(), MAX_GRADIENT_NORM)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _finish_part(run: Run, done: int, tally: Tally) -> None:
    """Keep the drafter if it is the best one, and write a checkpoint. The other processes wait.

    Args:
        run: the run.
        done: the number of finished steps.
        tally: the batches since the last checkpoint.
    """
    run.progress.step, run.progress.seconds = done, time.time() - run.start
    if run.accelerator.is_main_process:
        entry = keep_best(run, tally)
        run.save()
        tqdm.write(json.dumps(entry))
    run.accelerator.wait_for_everyone()
