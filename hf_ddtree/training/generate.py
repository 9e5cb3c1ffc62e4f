"""Training data: the target's own answers, in resumable shards."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import Sequence, shard_path, write_shard
from .prompts import read_prompts, self_instruct, tokenize


@dataclass
class GenerateConfig:
    """What to generate.

    Args:
        output: folder of the shards.
        shards: how many; those that exist are kept, so that an interrupted or extended run goes on.
        shard_size: sequences per shard.
        prompts: a JSONL file or a dataset id; None: the target writes the prompts itself.
        max_new_tokens: the longest answer.
        max_prompt_tokens: longer prompts are skipped.
        temperature, top_k: of the sampled answers.
        greedy_fraction: the part of each shard that is answered greedily.
        batch_size: answers at once.
        seed: shard i is drawn from seed + i.
    """

    output: Path
    shards: int = 10
    shard_size: int = 256
    prompts: str | None = None
    max_new_tokens: int = 192
    max_prompt_tokens: int = 256
    temperature: float = 0.7
    top_k: int = 40
    greedy_fraction: float = 0.67
    batch_size: int = 64
    seed: int = 0


def generate_shards(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GenerateConfig) -> None:
    """Write the shards that are missing; under `accelerate launch` each process writes its part of them."""
    state = PartialState(cpu=not torch.accelerator.is_available())  # without it CPU processes would not find each other
    config.output.mkdir(parents=True, exist_ok=True)
    prompts = None if config.prompts is None else file_prompts(tokenizer, config)
    mine = range(state.process_index, config.shards, state.num_processes)
    missing = [index for index in mine if not shard_path(config.output, index).exists()]
    for index in tqdm(missing, unit="shard", disable=not state.is_main_process):
        set_seed(config.seed + index)
        sequences = generate_shard(model, tokenizer, config, prompts, index)
        metadata = {"target": str(model.config.name_or_path), "seed": str(config.seed + index)}
        write_shard(shard_path(config.output, index), sequences, metadata)


def file_prompts(tokenizer: PreTrainedTokenizerBase, config: GenerateConfig) -> list[list[int]]:
    """The prompts of `config.prompts` as tokens, without those that are too long."""
    tokenized = [tokenize(tokenizer, prompt["messages"]) for prompt in read_prompts(config.prompts)]
    short = [tokens for tokens in tokenized if len(tokens) <= config.max_prompt_tokens]
    if not short:
        raise ValueError(f"--prompts {config.prompts}: no prompt has at most {config.max_prompt_tokens} tokens.")
    return short


def generate_shard(model, tokenizer, config: GenerateConfig, prompts, index: int) -> list[Sequence]:
    """The sequences of one shard: prompts in turn, or written by the target, and its answers."""
    if prompts is None:
        drafted, empty = [], 0
        while len(drafted) < config.shard_size:
            batch = self_instruct(model, tokenizer, config.batch_size)
            empty = 0 if batch else empty + 1
            if empty == 10:
                raise ValueError("self-instruct: the target never ends a user turn; give --prompts instead.")
            drafted += batch
        chosen = drafted[: config.shard_size]
    else:
        start = index * config.shard_size
        chosen = [prompts[(start + i) % len(prompts)] for i in range(config.shard_size)]
    n_greedy = round(config.greedy_fraction * len(chosen))
    sampling = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k}
    return [
        *answer(model, chosen[:n_greedy], config, {"do_sample": False}),
        *answer(model, chosen[n_greedy:], config, sampling),
    ]


@torch.no_grad()
def answer(model, prompts: list[list[int]], config: GenerateConfig, settings: dict) -> list[Sequence]:
    """The target's answers, in batches of similar prompt length."""
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    pad = model.generation_config.pad_token_id
    pad = min(ends, default=0) if pad is None else pad
    sequences = []
    ordered = sorted(prompts, key=len)
    for start in range(0, len(ordered), config.batch_size):
        batch = ordered[start : start + config.batch_size]
        width = max(map(len, batch))
        input_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
        outputs = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=pad,
            **settings,
        )
        temperature = settings.get("temperature", 0.0)
        for prompt, tokens in zip(batch, outputs[:, width:].tolist()):
            tokens = tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]
            sequences.append(Sequence(torch.tensor(prompt + tokens), len(prompt), temperature))
    return sequences
