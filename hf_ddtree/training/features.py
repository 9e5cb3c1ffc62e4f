"""The target's hidden states of all training data on disk, one file per shard: computed once, read in every epoch."""

import hashlib
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

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
    """Write the states of every shard that has no file yet: tapped `[T, taps * H]` and last `[T, H]`, in its order.

    `sequences` are all sequences of their shards. Of several processes each writes its part of the shards.

    Raises:
        ValueError: if `folder` holds states of other layers, another target or other tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = " ".join(map(str, layer_ids))
    target_name = f"{target.config.name_or_path} {target.dtype}"
    shards = [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.shard)]
    mine = shards[process_index::num_processes]
    for shard in tqdm(mine, desc="hidden states", unit="shard", disable=process_index > 0):
        path = folder / shard[0].shard
        tokens = hashlib.sha256(torch.cat([sequence.tokens for sequence in shard]).numpy().tobytes()).hexdigest()
        wanted = {"layer_ids": layers, "target": target_name, "tokens": tokens}
        if path.exists():
            with safe_open(path, framework="pt") as file:
                differing = [name for name, value in wanted.items() if (file.metadata() or {}).get(name) != value]
            if differing:
                raise ValueError(
                    f"{path} was computed with other {', '.join(differing)}; choose another --features folder."
                )
            continue
        tapped, last = [None] * len(shard), [None] * len(shard)
        by_length = sorted(range(len(shard)), key=lambda i: len(shard[i].tokens))  # little padding
        for start in range(0, len(shard), batch_size):
            part = by_length[start : start + batch_size]
            batch = make_batch([shard[i] for i in part], 1, 2, generator=None).to(target.device)
            for kept, states in zip((tapped, last), target_states(target, batch, layer_ids)):
                for i, row in zip(part, states):
                    kept[i] = row[: len(shard[i].tokens)].cpu()
        unfinished = path.with_suffix(".unfinished")
        save_file({"tapped": torch.cat(tapped), "last": torch.cat(last)}, unfinished, wanted)
        unfinished.replace(path)


def read_features(folder: Path, sequences: list[Sequence]) -> list[torch.Tensor]:
    """The tapped states of some sequences, `[B, L, taps * H]`, and the last ones, `[B, L, H]`, padded with zeros."""
    rows = {"tapped": [], "last": []}
    for sequence in sequences:
        end = sequence.offset + len(sequence.tokens)
        with safe_open(folder / sequence.shard, framework="pt") as file:
            for name in rows:
                rows[name].append(file.get_slice(name)[sequence.offset : end])
    return [torch.nn.utils.rnn.pad_sequence(states, batch_first=True) for states in rows.values()]
