"""Shards of generated sequences on disk."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Sequence:
    """A prompt and the target's answer.

    Args:
        tokens: `[n]` int64.
        prompt_length: the number of prompt tokens; the rest was generated.
        temperature: of the answer; 0 is greedy.
        shard, offset: where it was read from: the file's name and the index of its first token there.
    """

    tokens: torch.Tensor
    prompt_length: int
    temperature: float
    shard: str = ""
    offset: int = 0


def shard_path(folder: Path, index: int) -> Path:
    """Where shard `index` lies."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, sequences: list[Sequence], metadata: dict[str, str]) -> None:
    """Write sequences into one file that appears complete or not at all."""
    tensors = {
        "tokens": torch.cat([sequence.tokens for sequence in sequences]).to(torch.int32),
        "lengths": torch.tensor([len(sequence.tokens) for sequence in sequences], dtype=torch.int32),
        "prompt_lengths": torch.tensor([sequence.prompt_length for sequence in sequences], dtype=torch.int32),
        "temperatures": torch.tensor([sequence.temperature for sequence in sequences], dtype=torch.float32),
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    unfinished.replace(path)


def read_shards(folder: Path) -> list[Sequence]:
    """All sequences of a folder, in order of shard and position.

    Raises:
        ValueError: if the folder holds no shard.
    """
    paths = sorted(Path(folder).glob("shard-*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no shard-*.safetensors; run `python -m hf_ddtree.training generate` first.")
    return [sequence for path in paths for sequence in _read_shard(path)]


def _read_shard(path: Path) -> list[Sequence]:
    with safe_open(path, framework="pt") as file:
        tokens, lengths, prompt_lengths, temperatures = (
            file.get_tensor(name) for name in ("tokens", "lengths", "prompt_lengths", "temperatures")
        )
    ends = lengths.cumsum(0)
    fields = zip((ends - lengths).tolist(), ends.tolist(), prompt_lengths.tolist(), temperatures.tolist())
    return [Sequence(tokens[o:end].long(), prompt, t, path.name, o) for o, end, prompt, t in fields]


def split_held_out(sequences: list[Sequence], n_held_out: int) -> tuple[list[Sequence], list[Sequence]]:
    """Training sequences and the greedy sequences held out from them, evenly spaced over the data.

    Sequences whose prompt is also held out are left out of both, so that nothing held out was trained on.
    """
    greedy = [i for i, sequence in enumerate(sequences) if sequence.temperature == 0]
    step = max(1, len(greedy) // max(1, n_held_out))
    chosen = set(greedy[::step][:n_held_out])
    held_out = [sequences[i] for i in sorted(chosen)]
    prompts = {tuple(sequence.tokens[: sequence.prompt_length].tolist()) for sequence in held_out}
    rest = (sequence for i, sequence in enumerate(sequences) if i not in chosen)
    training = [s for s in rest if tuple(s.tokens[: s.prompt_length].tolist()) not in prompts]
    return training, held_out


def batches(sequences: list[Sequence], batch_size: int, seed: int) -> list[list[int]]:
    """One epoch: indices in batches of similar length, in random order; a function of `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sequences), generator=generator).tolist()
    pool = 32 * batch_size  # sorted by length within pools, which keeps both padding and order effects small
    result = []
    for start in range(0, len(order), pool):
        part = sorted(order[start : start + pool], key=lambda i: len(sequences[i].tokens))
        result += [part[i : i + batch_size] for i in range(0, len(part) - batch_size + 1, batch_size)]
    return [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]
