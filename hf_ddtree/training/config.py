"""The options of the commands `generate` and `train`: a field per option, annotated with its help text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass
class GenerateConfig:
    """How to generate training data."""

    output: Annotated[Path, "folder for the shards"]
    shards: Annotated[int, "shards in all. Existing shards are kept, so a second run continues the first"] = 10
    shard_size: Annotated[int, "sequences per shard"] = 256
    prompts: Annotated[str | None, "JSONL file or dataset id. By default the target writes the prompts itself"] = None
    max_new_tokens: Annotated[int, "maximum length of an answer in tokens"] = 192
    max_prompt_tokens: Annotated[int, "prompts from --prompts that have more tokens are skipped"] = 256
    temperature: Annotated[float, "temperature of the sampled answers"] = 0.7
    top_k: Annotated[int, "sampled answers draw each token from this many most probable ones"] = 40
    greedy_fraction: Annotated[float, "fraction of each shard that the target answers greedily"] = 0.67
    batch_size: Annotated[int, "answers that are generated at once"] = 64
    seed: Annotated[int, "shard i is generated from the seed plus i"] = 0


@dataclass
class TrainConfig:
    """How to train a drafter.

    Raises:
        ValueError: if `block_size` is less than 2.
    """

    data: Annotated[Path, "folder of the shards"]
    output: Annotated[Path, "folder for the drafter and for the checkpoint from which a run resumes"]
    features: Annotated[
        Path | None,
        "folder for the target's hidden states, which are then computed once and read in every epoch. This suits "
        "several epochs on a small machine. By default every step computes them",
    ] = None
    initial: Annotated[
        str | None, "path or Hub id of a drafter to continue from, for example with new data. Default: random weights"
    ] = None
    steps: Annotated[int, "optimizer steps in all"] = 2000
    num_layers: Annotated[int, "layers of the drafter"] = 3
    block_size: Annotated[int, "tokens per block, root included"] = 8
    layer_ids: Annotated[
        list[int] | None, "the target's layers that the drafter reads, from 0. Default: five, evenly spaced"
    ] = None
    mask_token_id: Annotated[int, "a token of the target that never occurs in text"] = 0
    batch_size: Annotated[int, "sequences per batch and process"] = 8
    accumulate: Annotated[int, "batches per optimizer step"] = 1
    anchors: Annotated[int, "blocks per sequence"] = 64
    learning_rate: Annotated[float, "peak learning rate, from which it falls along a cosine"] = 2e-3
    warmup: Annotated[int, "steps of the linear warm-up to the peak learning rate"] = 100
    decay: Annotated[float, "position k of a block has the weight exp(-(k - 1) / DECAY) in the loss"] = 4.0
    kl_weight: Annotated[float, "weight of the divergence from the target's distribution in the loss, from 0 to 1"] = (
        0.0
    )
    frequent: Annotated[
        int,
        "the sampled softmax includes this many most frequent tokens. 0 here and in --negatives means the "
        "whole vocabulary",
    ] = 8192
    negatives: Annotated[int, "the sampled softmax includes this many random tokens"] = 2048
    held_out: Annotated[int, "greedy sequences that are held out to compute the acceptance"] = 32
    evaluate_every: Annotated[int, "steps between checkpoints, each with the held-out acceptance"] = 200
    mixed_precision: Annotated[str, "'no' or 'bf16'"] = "bf16"
    seed: Annotated[int, "seed of all random choices"] = 0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(
                f"--block-size {self.block_size} leaves nothing to predict, because the root is the first token of a "
                "block. Choose at least 2."
            )
