"""What a training run consists of, and how it starts or resumes."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from ..drafters.dflash_model import DFlashDraftModel
from .checkpoint import Progress, check_same_run, load_checkpoint, run_settings, save_checkpoint
from .config import TrainConfig
from .data import Sequence, read_shards, split_held_out
from .features import compute_features
from .initial import new_drafter, start_from
from .optimizers import make_optimizers
from .order import BatchOrder
from .scale import state_scale


@dataclass
class Run:
    """One training run.

    Args:
        config: its settings.
        accelerator: places tensors and joins processes.
        target: frozen, in evaluation mode.
        drafter: the network that is trained.
        model: the same network, wrapped for distributed training where there are several processes.
        layer_ids: the target's layers that the drafter reads, from 0.
        scale: `[taps * H]`, the result of `state_scale`.
        optimizers: their states belong to `drafter`.
        order: which sequences each step sees.
        frequent: `[F]` int64, the tokens that every sampled softmax includes.
        held_out: greedy sequences to compute the acceptance on.
        progress: how far the run has come.
        start: the time in seconds at which the run would have started if it had never stopped.
    """

    config: TrainConfig
    accelerator: Accelerator
    target: PreTrainedModel
    drafter: DFlashDraftModel
    model: torch.nn.Module
    layer_ids: list[int]
    scale: torch.Tensor
    optimizers: list[torch.optim.Optimizer]
    order: BatchOrder
    frequent: torch.Tensor
    held_out: list[Sequence]
    progress: Progress
    start: float

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(checkpoint_path(self.config), self.drafter, self.optimizers, self.progress)


def start_run(target: PreTrainedModel, config: TrainConfig) -> Run:
    """Start a run, or resume it if its output folder holds a checkpoint.

    Args:
        target: the model to draft for. It is frozen and moved to the accelerator.
        config: the settings.

    Raises:
        ValueError: if there is too little data, if the checkpoint belongs to a run with other settings, if stored
            hidden states belong to another target or other data, or if the initial drafter has another shape.
    """
    start = time.time()
    # without `cpu=True`, several CPU processes would not find each other
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=not torch.accelerator.is_available())
    set_seed(config.seed)
    sequences = read_shards(config.data)
    training, held_out = split_held_out(sequences, config.held_out)
    _check_data(training, held_out, config)
    config.output.mkdir(parents=True, exist_ok=True)
    target = target.to(accelerator.device).eval().requires_grad_(False)
    drafter = new_drafter(target, config).to(accelerator.device)
    layer_ids = drafter.config.target_layer_ids
    scale = state_scale(target, layer_ids, training[: config.batch_size])
    if config.initial is not None:
        start_from(config.initial, drafter, scale)
    optimizers = make_optimizers(drafter)
    progress = _resume(config, drafter, optimizers, run_settings(config, sequences))
    process, processes = accelerator.process_index, accelerator.num_processes
    if config.features is not None:
        compute_features(target, sequences, layer_ids, config.features, config.batch_size, process, processes)
    accelerator.wait_for_everyone()
    return Run(
        config=config,
        accelerator=accelerator,
        target=target,
        drafter=drafter,
        model=accelerator.prepare_model(drafter),
        layer_ids=layer_ids,
        scale=scale,
        optimizers=optimizers,
        order=BatchOrder(training, config, process, processes),
        frequent=most_frequent(training, config.frequent),
        held_out=held_out,
        progress=progress,
        start=start - progress.seconds,
    )


def checkpoint_path(config: TrainConfig) -> Path:
    """Return the path of the checkpoint from which a run resumes."""
    return config.output / "checkpoint.safetensors"


def most_frequent(sequences: list[Sequence], n: int) -> torch.Tensor:
    """Return the `n` most frequent generated tokens, int64, or all generated tokens if there are fewer."""
    generated = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in sequences])
    counts = torch.bincount(generated)
    return counts.argsort(descending=True)[: min(n, int((counts > 0).sum()))]


def _check_data(training: list[Sequence], held_out: list[Sequence], config: TrainConfig) -> None:
    if len(training) < config.batch_size:
        raise ValueError(
            f"--data {config.data} has {len(training)} sequences to train on, which do not fill one batch of "
            f"--batch-size {config.batch_size}. Generate more shards, or lower --batch-size."
        )
    if not held_out:
        raise ValueError(
            f"--held-out {config.held_out} holds out no greedy answer, so the acceptance cannot be computed. "
            "Raise --held-out, or generate shards with a --greedy-fraction above 0."
        )


def _resume(
    config: TrainConfig,
    drafter: DFlashDraftModel,
    optimizers: list[torch.optim.Optimizer],
    settings: dict[str, str],
) -> Progress:
    """Load the checkpoint, if there is one, and return the progress of the run."""
    path = checkpoint_path(config)
    if not path.exists():
        return Progress(settings)
    check_same_run(path, settings)
    return load_checkpoint(path, drafter, optimizers)
