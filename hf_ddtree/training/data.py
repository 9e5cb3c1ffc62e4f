"""The training data: shards of sequences on disk, and which sequences are held out."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..files import write_then_rename
from ..tree import float32, int64


@dataclass
class Sequence:
    """A prompt and the target's answer.

    Args:
        tokens: `[n]` int64, prompt and answer.
        prompt_length: the number of prompt tokens. The remaining tokens were generated.
        temperature: the temperature of the answer, 0 for a greedy one.
        shard: the name of the file that the sequence was read from.
        offset: the index of the first token in that file.
    """

    tokens: torch.Tensor
    prompt_length: int
    temperature: float
    shard: str = ""
    offset: int = 0


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of shard `index` in a folder."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, sequences: list[Sequence], metadata: dict[str, str]) -> None:
    """Write sequences into one file, which appears complete or not at all.

    Args:
        path: the file.
        sequences: what to write, in this order.
        metadata: strings to store in the file's header.
    """
    tensors = {
        "tokens": torch.cat([sequence.tokens for sequence in sequences]).to(torch.int32),
        "lengths": int64([len(sequence.tokens) for sequence in sequences]).to(torch.int32),
        "prompt_lengths": int64([sequence.prompt_length for sequence in sequences]).to(torch.int32),
        "temperatures": float32([sequence.temperature for sequence in sequences]),
    }
    write_then_rename(path, lambda unfinished: save_file(tensors, unfinished, metadata))


def read_shards(folder: Path) -> list[Sequence]:
    """Read all sequences of a folder, in order of shard and position.

    Raises:
        ValueError: if the folder holds no shard.
    """
    paths = sorted(Path(folder).glob("shard-*.safetensors"))
    if not paths:
        raise ValueError(
            f"{folder} holds no shard-*.safetensors, so there is nothing to train on. "
            "Run 'python -m hf_ddtree.training generate' first."
        )
    return [sequence for path in paths for sequence in _read_shard(path)]


def _read_shard(path: Path) -> list[Sequence]:
    with safe_open(path, framework="pt") as file:
        tokens, lengths, prompt_lengths, temperatures = (
            file.get_tensor(name) for name in ("tokens", "lengths", "prompt_lengths", "temperatures")
        )
    ends = lengths.cumsum(0)
    fields = zip((ends - lengths).tolist(), ends.tolist(), prompt_lengths.tolist(), temperatures.tolist(), strict=True)
    return [
        Sequence(tokens[start:end].long(), prompt_length, temperature, path.name, start)
        for start, end, prompt_length, temperature in fields
    ]


def split_held_out(sequences: list[Sequence], n_held_out: int) -> tuple[list[Sequence], list[Sequence]]:
    """Hold out greedy sequences, evenly spaced over the data.

    Args:
        sequences: all sequences.
        n_held_out: how many greedy sequences to hold out. There are fewer if the data has fewer.

    Returns:
        The training sequences and the held-out ones. Other sequences with a held-out prompt are in neither list, so
        that no held-out prompt is trained on.
    """
    greedy = [i for i, sequence in enumerate(sequences) if sequence.temperature == 0]
    step = max(1, len(greedy) // max(1, n_held_out))
    chosen = set(greedy[::step][:n_held_out])
    held_out = [sequences[i] for i in sorted(chosen)]
    prompts = {tuple(sequence.tokens[: sequence.prompt_length].tolist()) for sequence in held_out}
    rest = (sequence for i, sequence in enumerate(sequences) if i not in chosen)
    training = [s for s in rest if tuple(s.tokens[: s.prompt_length].tolist()) not in prompts]
    return training, held_out
