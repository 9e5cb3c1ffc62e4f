"""The target's hidden states of all training data, in a file per shard: computed once and read in every epoch."""

import hashlib
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from ..files import write_then_rename
from .blocks import make_batch, target_states
from .data import Sequence


def compute_features(
    target: PreTrainedModel,
    sequences: list[Sequence],
    layer_ids: list[int],
    folder: Path,
    batch_size: int,
    process_index: int = 0,
    num_processes: int = 1,
) -> None:
    """Write the hidden states of every shard that has no file yet: `tapped` `[T, taps * H]` and `last` `[T, H]`.

    T counts the tokens of a shard, in the shard's order.

    Args:
        target: the model to run.
        sequences: all sequences of their shards.
        layer_ids: the layers to tap, from 0.
        folder: where to write.
        batch_size: sequences per forward.
        process_index: this process, from 0. Each process writes its part of the shards.
        num_processes: the number of processes.

    Raises:
        ValueError: if `folder` holds the states of other layers, of another target or of other tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.shard)]
    mine = shards[process_index::num_processes]
    for shard in tqdm(mine, desc="hidden states", unit="shard", disable=process_index > 0):
        path = folder / shard[0].shard
        metadata = {
            "layer_ids": " ".join(map(str, layer_ids)),
            "target": f"{target.config.name_or_path} {target.dtype}",
            "tokens": hashlib.sha256(torch.cat([sequence.tokens for sequence in shard]).numpy().tobytes()).hexdigest(),
        }
        if path.exists():
            _check_metadata(path, metadata)
            continue
        _write(path, _shard_states(target, shard, layer_ids, batch_size), metadata)


def _check_metadata(path: Path, wanted: dict[str, str]) -> None:
    with safe_open(path, framework="pt") as file:
        found = file.metadata() or {}
    differing = [name for name, value in wanted.items() if found.get(name) != value]
    if differing:
        raise ValueError(
            f"{path} was computed for other settings ({', '.join(differing)}), so this run cannot use it. "
            "Choose another --features folder."
        )


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    write_then_rename(path, lambda unfinished: save_file(tensors, unfinished, metadata))


def _shard_states(
    target: PreTrainedModel, shard: list[Sequence], layer_ids: list[int], batch_size: int
) -> dict[str, torch.Tensor]:
    nothing = torch.empty(0, dtype=target.dtype, device="cpu")
    tapped, last = [nothing] * len(shard), [nothing] * len(shard)
    by_length = sorted(range(len(shard)), key=lambda i: len(shard[i].tokens))  # this keeps the padding small
    for start in range(0, len(shard), batch_size):
        indices = by_length[start : start + batch_size]
        batch = make_batch([shard[i] for i in indices], n_anchors=1, block_size=2, generator=None).to(target.device)
        tapped_rows, last_rows = target_states(target, batch, layer_ids)
        for row, i in enumerate(indices):
            length = len(shard[i].tokens)
            tapped[i] = tapped_rows[row, :length].cpu()
            last[i] = last_rows[row, :length].cpu()
    return {"tapped": torch.cat(tapped), "last": torch.cat(last)}


def read_features(folder: Path, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the hidden states of sequences, padded with zeros.

    Args:
        folder: where `compute_features` wrote them.
        sequences: read from shards, in any order.

    Returns:
        The tapped states `[B, L, taps * H]`, and the states `[B, L, H]` that the target's head reads.
    """
    tapped, last = [], []
    for sequence in sequences:
        end = sequence.offset + len(sequence.tokens)
        with safe_open(folder / sequence.shard, framework="pt") as file:
            tapped.append(file.get_slice("tapped")[sequence.offset : end])
            last.append(file.get_slice("last")[sequence.offset : end])
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tapped, batch_first=True), pad(last, batch_first=True)
