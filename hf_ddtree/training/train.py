"""The training loop of a DFlash drafter."""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import PreTrainedModel

from ..drafters import DFlashConfig, DFlashDraftModel, load_drafter
from ..drafters.dflash_model import evenly_spaced_layers
from .acceptance import CHAIN, held_out_tokens_per_round
from .blocks import Batch, draft_blocks, make_batch, target_states
from .card import write_card, write_log
from .checkpoint import load_checkpoint, read_progress, save_checkpoint
from .data import Sequence, batches, read_shards, split_held_out
from .features import compute_features, read_features
from .loss import candidate_tokens, draft_loss

HELD_OUT_BUDGETS = (CHAIN, 16, 64)


@dataclass
class TrainConfig:
    """How to train.

    Args:
        data: folder of shards.
        features: folder for the target's hidden states, computed once and then read: for several epochs on a small
            machine. None computes them anew at each step.
        output: folder of the drafter; `checkpoint.safetensors` in it resumes an interrupted run.
        initial: path or Hub id of a drafter to go on from, e.g. with new data; None starts from random weights.
        steps: optimizer steps in all.
        num_layers, block_size: of the drafter.
        layer_ids: the target's layers to read; None: five, evenly spaced.
        mask_token_id: a token of the target that never occurs in text.
        batch_size: sequences per step and process.
        accumulate: batches per optimizer step.
        anchors: blocks per sequence.
        learning_rate, warmup: peak rate, reached after `warmup` steps; it then falls along a cosine.
        decay: of the loss over block positions.
        kl_weight: weight of the divergence from the target's distribution, 0 to 1.
        frequent, negatives: size of the sampled softmax; both 0 for the whole vocabulary.
        held_out: greedy sequences to measure acceptance on.
        evaluate_every: steps between measurements and checkpoints.
        mixed_precision: "no" or "bf16".
        seed: of everything random.
    """

    data: Path
    output: Path
    features: Path | None = None
    initial: str | None = None
    steps: int = 2000
    num_layers: int = 3
    block_size: int = 8
    layer_ids: list[int] | None = None
    mask_token_id: int = 0
    batch_size: int = 8
    accumulate: int = 1
    anchors: int = 64
    learning_rate: float = 2e-3
    warmup: int = 100
    decay: float = 4.0
    kl_weight: float = 0.0
    frequent: int = 8192
    negatives: int = 2048
    held_out: int = 32
    evaluate_every: int = 200
    mixed_precision: str = "bf16"
    seed: int = 0

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"--block-size {self.block_size}: a block is the root and at least one token.")


def train(target: PreTrainedModel, config: TrainConfig) -> None:
    """Train a drafter for `target`, or go on where an earlier run with the same output stopped.

    Every step is a function of the seed and its number, so a resumed run is the run it continues. The best drafter by
    held-out tokens per round lies in `config.output`, in the z-lab layout, with a card and the log of measurements.

    Args:
        target: frozen; in the dtype it should run in.
    """
    start = time.time()
    on_cpu = not torch.accelerator.is_available()  # without it CPU processes would not find each other
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=on_cpu)
    set_seed(config.seed)
    sequences = read_shards(config.data)
    training, held_out = split_held_out(sequences, config.held_out)
    check_data(training, held_out, config)
    config.output.mkdir(parents=True, exist_ok=True)
    target = target.to(accelerator.device).eval().requires_grad_(False)
    drafter = new_drafter(target, config).to(accelerator.device)
    scale = state_scale(target, drafter.config.target_layer_ids, training[: config.batch_size])
    if config.initial is not None:
        start_from(config.initial, drafter, scale)
    optimizers = make_optimizers(drafter)
    progress = {"step": 0, "best": 0.0, "seconds": 0.0, "log": [], "settings": run_settings(config, sequences)}
    checkpoint = config.output / "checkpoint.safetensors"
    if checkpoint.exists():
        check_same_run(checkpoint, progress["settings"])
        progress = load_checkpoint(checkpoint, drafter, optimizers)
    if config.features is not None:
        mine = (accelerator.process_index, accelerator.num_processes)
        compute_features(target, sequences, drafter.config.target_layer_ids, config.features, config.batch_size, *mine)
    accelerator.wait_for_everyone()
    model = accelerator.prepare_model(drafter)
    frequent = most_frequent(training, config.frequent)

    steps = tqdm(
        range(progress["step"], config.steps),
        initial=progress["step"],
        total=config.steps,
        unit="step",
        disable=not accelerator.is_main_process,
    )
    epoch = lru_cache(maxsize=2)(lambda number: batches(training, config.batch_size, config.seed + number))
    counts, losses, before = 0, [], progress["seconds"]
    for step in steps:
        for optimizer in optimizers:
            set_learning_rate(optimizer, learning_rate(step, config))
        for chosen, generator in step_batches(training, epoch, config, step, accelerator):
            batch = make_batch(chosen, config.anchors, config.block_size, generator).to(accelerator.device)
            context, last = states_for(target, drafter.config, batch, chosen, config)
            states = context * scale, last
            labels, vocab_size = batch.labels, target.get_output_embeddings().weight.shape[0]
            candidates = candidate_tokens(labels, frequent, config.negatives, vocab_size, generator)
            loss, right = batch_loss(model, drafter.config, target, batch, states, candidates, config, accelerator)
            accelerator.backward(loss / config.accumulate)
            losses.append(float(loss.detach()))
            counts = counts + right
        accelerator.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % config.evaluate_every == 0 or done == config.steps:
            progress["step"], progress["seconds"] = done, before + time.time() - start
            if accelerator.is_main_process:
                measure(drafter, scale, target, held_out, progress, losses, counts, config)
                save_checkpoint(checkpoint, drafter, optimizers, progress)
                steps.write(json.dumps(progress["log"][-1]))
            counts, losses = 0, []
            accelerator.wait_for_everyone()


def check_data(training: list[Sequence], held_out: list[Sequence], config: TrainConfig) -> None:
    """Raise a ValueError if there is too little to train on or to measure with."""
    if len(training) < config.batch_size:
        raise ValueError(
            f"--data {config.data} has {len(training)} sequences to train on, fewer than --batch-size {config.batch_size}."
        )
    if not held_out:
        raise ValueError("--held-out: there is no greedy answer to measure acceptance on; generate some, or raise it.")


def run_settings(config: TrainConfig, sequences: list[Sequence]) -> dict[str, str]:
    """What must stay the same when a run is resumed: the data and all settings but where things lie and when to measure."""
    free = ("output", "features", "evaluate_every")
    tokens = torch.cat([sequence.tokens for sequence in sequences])
    data = {"data": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}
    return {name: str(value) for name, value in {**asdict(config), **data}.items() if name not in free}


def check_same_run(checkpoint: Path, wanted: dict[str, str]) -> None:
    """Raise a ValueError if the checkpoint is of a run with other settings."""
    saved = read_progress(checkpoint)["settings"]
    changed = [name for name in wanted if saved.get(name) != wanted[name]]
    if changed:
        raise ValueError(
            f"{checkpoint} is of a run with other settings ({', '.join(changed)}); choose another --output to start anew."
        )


def new_drafter(target: PreTrainedModel, config: TrainConfig) -> DFlashDraftModel:
    """A random drafter of the target's width and attention shape."""
    shape = target.config.get_text_config(decoder=True)
    layer_ids = config.layer_ids or evenly_spaced_layers(shape.num_hidden_layers, 5)
    heads = shape.num_attention_heads
    fields = DFlashConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(shape, "num_key_value_heads", None) or heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=getattr(shape, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(shape)},
        num_target_layers=shape.num_hidden_layers,
        block_size=config.block_size,
        dflash_config={"mask_token_id": config.mask_token_id, "target_layer_ids": layer_ids},
        bos_token_id=shape.bos_token_id,
        eos_token_id=shape.eos_token_id,
        tie_word_embeddings=False,
    )
    drafter = DFlashDraftModel(fields)
    # logits of spread 1: the head is the target's, and its rows may be large
    spread = target.get_output_embeddings().weight.detach().float().std() * shape.hidden_size**0.5
    torch.nn.init.constant_(drafter.norm.weight, 1 / float(spread))
    return drafter


def start_from(initial: str, drafter: DFlashDraftModel, scale: torch.Tensor) -> None:
    """Copy the weights of a finished drafter: what `finished_drafter` did, undone.

    Raises:
        ValueError: if the drafter has another shape than the settings ask for.
    """
    finished = load_drafter(initial, dtype=torch.float32)
    if not isinstance(finished, DFlashDraftModel):
        raise ValueError(f"--initial {initial} is a {type(finished).__name__}; it must be a DFlash drafter.")
    ours, theirs = (
        {
            "--num-layers": d.config.num_hidden_layers,
            "--block-size": d.config.block_size,
            "--layer-ids": d.config.target_layer_ids,
            "--mask-token-id": d.config.mask_token_id,
            "--model of width": d.config.hidden_size,
        }
        for d in (drafter, finished)
    )
    differing = ", ".join(f"{name} {theirs[name]} (not {ours[name]})" for name in ours if ours[name] != theirs[name])
    if differing:
        raise ValueError(f"--initial {initial} needs {differing}.")
    weights = finished.state_dict()
    weights["fc.weight"] /= scale.to(weights["fc.weight"])
    drafter.load_state_dict(weights)


def rope_theta(shape) -> float:
    """The target's RoPE base, where it has one for all layers."""
    parameters = getattr(shape, "rope_parameters", None) or {}
    return parameters.get("rope_theta") or 10_000.0


def make_optimizers(drafter: DFlashDraftModel) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    others = [p for p in drafter.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to 3% of the peak."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    through = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * through)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def most_frequent(sequences: list[Sequence], n: int) -> torch.Tensor:
    """The `n` most frequent generated tokens."""
    generated = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in sequences])
    counts = torch.bincount(generated)
    return counts.argsort(descending=True)[: min(n, int((counts > 0).sum()))]


def step_batches(training: list[Sequence], epoch, config: TrainConfig, step: int, accelerator: Accelerator):
    """The batches of this step and process, each with a generator for what is random in it.

    Args:
        epoch: gives the batches of an epoch by its number.
    """
    per_step = config.accumulate * accelerator.num_processes
    first = step * per_step + accelerator.process_index * config.accumulate
    per_epoch = len(epoch(0))
    for number in range(first, first + config.accumulate):
        number_of_epoch, position = divmod(number, per_epoch)
        indices = epoch(number_of_epoch)[position]
        generator = torch.Generator().manual_seed(config.seed + 1_000_003 * (number + 1))
        yield [training[i] for i in indices], generator


def state_scale(target, layer_ids: list[int], sequences: list[Sequence]) -> torch.Tensor:
    """What brings the states of every tapped layer to a root mean square of 1: `[taps * H]`.

    Deep layers are an order of magnitude larger than early ones and would drown them. Medians, since the first token of a
    sequence is larger still. The finished drafter has the scale in its `fc`.
    """
    batch = make_batch(sequences, 1, 2, generator=None).to(target.device)
    states, _ = target_states(target, batch, layer_ids)
    states = states[batch.valid].unflatten(-1, (len(layer_ids), -1)).float()
    typical = states.square().mean(-1).sqrt().median(0).values
    return (1 / typical).repeat_interleave(states.shape[-1]).to(target.dtype)


def states_for(target, drafter_config: DFlashConfig, batch: Batch, sequences: list[Sequence], config: TrainConfig):
    """The tapped states of a batch, and the states the target's head reads if the loss needs them."""
    if config.features is not None:
        context, last = (states.to(batch.tokens.device) for states in read_features(config.features, sequences))
    else:
        context, last = target_states(target, batch, drafter_config.target_layer_ids)
    return context, last if config.kl_weight > 0 else None


def batch_loss(model, drafter_config, target, batch: Batch, states, candidates, config: TrainConfig, accelerator):
    """Loss and counts of right predictions of one batch; `states` as from `states_for`."""
    context, last = states
    head = target.get_output_embeddings().weight
    teacher = None
    if last is not None:  # the state that predicts successor k stands k - 1 after the root
        index = batch.anchors[..., None] + torch.arange(batch.labels.shape[-1], device=batch.anchors.device)
        rows = torch.arange(len(last), device=index.device)[:, None, None]
        teacher = last[rows, index.clamp(max=last.shape[1] - 1)]
    with accelerator.autocast():
        predicted = draft_blocks(model, drafter_config, target.get_input_embeddings(), batch, context)
        return draft_loss(predicted, batch.labels, head, candidates, config.decay, teacher, config.kl_weight)


def finished_drafter(drafter: DFlashDraftModel, scale: torch.Tensor) -> DFlashDraftModel:
    """A copy that takes the target's states as they are: with the scale they were trained under in `fc`."""
    finished = DFlashDraftModel(drafter.config)
    finished.load_state_dict(drafter.state_dict())
    finished.fc.weight.data *= scale.to(finished.fc.weight)
    return finished.eval()


def measure(drafter, scale, target, held_out, progress: dict, losses, counts, config: TrainConfig) -> None:
    """Log held-out acceptance, and keep the drafter if it is the best so far."""
    finished = finished_drafter(drafter, scale).to(device=target.device, dtype=target.dtype)
    figures = held_out_tokens_per_round(finished, target, held_out, HELD_OUT_BUDGETS)
    entry = {
        "step": progress["step"],
        "seconds": round(progress["seconds"]),
        "loss": round(sum(losses) / len(losses), 4),
        "accuracy": [round(float(right / made), 3) for right, made in counts.tolist() if made],
        "tokens_per_round": {("chain" if b == CHAIN else str(b)): round(v, 3) for b, v in figures.items()},
    }
    progress["log"].append(entry)
    if figures[HELD_OUT_BUDGETS[1]] > progress["best"]:
        progress["best"] = figures[HELD_OUT_BUDGETS[1]]
        finished.to(torch.bfloat16).save_pretrained(config.output)
        write_card(config.output, target, asdict(config), progress)
    write_log(config.output, asdict(config), progress)
