"""Generate the training data: the target's own answers, in shards that a second run does not generate again."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..tree import int64
from .config import GenerateConfig
from .data import Sequence, shard_path, write_shard
from .prompts import read_prompts, self_instruct, tokenize

MAX_EMPTY_BATCHES = 10  # in a row, before self-instruct gives up


def generate_shards(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GenerateConfig) -> None:
    """Write the shards that are missing. Under `accelerate launch` each process writes its part of them.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        config: the settings.

    Raises:
        ValueError: if there is no usable prompt.
    """
    # without `cpu=True`, several CPU processes would not find each other
    state = PartialState(cpu=not torch.accelerator.is_available())
    config.output.mkdir(parents=True, exist_ok=True)
    prompts = None
    if config.prompts is not None:
        prompts = _short_prompts(tokenizer, config.prompts, config.max_prompt_tokens)
    mine = range(state.process_index, config.shards, state.num_processes)
    missing = [index for index in mine if not shard_path(config.output, index).exists()]
    for index in tqdm(missing, unit="shard", disable=not state.is_main_process):
        set_seed(config.seed + index)
        if prompts is None:
            chosen = _invented_prompts(model, tokenizer, config)
        else:
            start = index * config.shard_size
            chosen = [prompts[(start + i) % len(prompts)] for i in range(config.shard_size)]
        metadata = {"target": str(model.config.name_or_path), "seed": str(config.seed + index)}
        write_shard(shard_path(config.output, index), _answer_all(model, chosen, config), metadata)


def _short_prompts(tokenizer: PreTrainedTokenizerBase, source: str, max_tokens: int) -> list[list[int]]:
    """Return the tokens of the prompts of a file or dataset that have at most `max_tokens` tokens."""
    tokenized = [tokenize(tokenizer, prompt["messages"]) for prompt in read_prompts(source)]
    short = [tokens for tokens in tokenized if len(tokens) <= max_tokens]
    if not short:
        raise ValueError(
            f"--prompts {source} has no prompt of at most {max_tokens} tokens, and longer prompts are skipped. "
            "Raise --max-prompt-tokens."
        )
    return short


def _invented_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GenerateConfig
) -> list[list[int]]:
    """Return the tokens of `config.shard_size` prompts that the target writes itself."""
    prompts: list[list[int]] = []
    n_empty = 0
    while len(prompts) < config.shard_size:
        batch = self_instruct(model, tokenizer, config.batch_size)
        n_empty = 0 if batch else n_empty + 1
        if n_empty == MAX_EMPTY_BATCHES:
            raise ValueError(
                f"The target ended no user's turn in {MAX_EMPTY_BATCHES} batches, so it cannot write its own prompts. "
                "Pass prompts with --prompts."
            )
        prompts += batch
    return prompts[: config.shard_size]


def _answer_all(model: PreTrainedModel, prompts: list[list[int]], config: GenerateConfig) -> list[Sequence]:
    """Answer the first `config.greedy_fraction` of the prompts greedily, and sample the other answers."""
    n_greedy = round(config.greedy_fraction * len(prompts))
    sampling = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k}
    return [
        *answer(model, prompts[:n_greedy], config, {"do_sample": False}),
        *answer(model, prompts[n_greedy:], config, sampling),
    ]


@torch.no_grad()
def answer(
    model: PreTrainedModel, prompts: list[list[int]], config: GenerateConfig, settings: dict[str, Any]
) -> list[Sequence]:
    """Return the target's answers, ordered by the length of their prompts.

    Args:
        model: the target.
        prompts: token ids.
        config: gives the batch size and the maximum length of an answer.
        settings: the sampling settings of `generate`.
    """
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    pad = model.generation_config.pad_token_id
    pad = min(ends, default=0) if pad is None else pad
    temperature = settings.get("temperature", 0.0)
    sequences = []
    ordered = sorted(prompts, key=len)  # batches of similar length need little padding
    for start in range(0, len(ordered), config.batch_size):
        batch = ordered[start : start + config.batch_size]
        width = max(map(len, batch))
        padding = [width - len(prompt) for prompt in batch]
        input_ids = [[pad] * n + prompt for n, prompt in zip(padding, batch, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in padding]
        outputs = model.generate(
            torch.tensor(input_ids, dtype=torch.long, device=model.device),
            attention_mask=torch.tensor(mask, dtype=torch.long, device=model.device),
            max_new_tokens=config.max_new_tokens,
            pad_token_id=pad,
            **settings,
        )
        for prompt, row in zip(batch, outputs[:, width:].tolist(), strict=True):
            tokens = prompt + _up_to_end(row, ends)
            sequences.append(Sequence(int64(tokens), len(prompt), temperature))
    return sequences


def _up_to_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first end token, included, or all tokens if there is none."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]
