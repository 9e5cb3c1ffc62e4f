"""Prompts to generate training data from: a file, a dataset, or the target's own imagination."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARKER = "\u241e"  # stands for the user's words when looking at what a chat template puts around them
MAX_USER_TOKENS = 96
SELF_INSTRUCT_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 50}


def read_prompts(source: str) -> list[dict]:
    """Prompts as `{"messages": [...], "kind": ...}`.

    Args:
        source: a JSONL file with a "prompt" (text) or "messages" (chat) per line and optionally a "kind", or the id of a
            dataset with such columns (needs the package `datasets`).

    Raises:
        ValueError: for a line without a prompt, naming file and line.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            rows = [_parse(line, source, number) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        from datasets import load_dataset

        rows = load_dataset(source, split="train")
    return [_as_messages(row, source, number) for number, row in enumerate(rows, 1)]


def _parse(line: str, source: str, number: int) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {number}: no JSON ({error}).") from error


def _as_messages(row: dict, source: str, number: int) -> dict:
    row = row if isinstance(row, dict) else {}
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
    # an answer in the data is not the target's own
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not all(isinstance(message.get("content"), str) for message in messages):
        raise ValueError(f"{source}, entry {number}: expected a text in 'prompt' or a chat in 'messages'.")
    return {"messages": messages, "kind": row.get("kind", "all")}


def tokenize(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> list[int]:
    """The prompt's tokens up to where the answer begins; plain text if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def self_instruct(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int) -> list[list[int]]:
    """Prompts, as tokens, that the target writes itself: it is given the opening of a user turn and continues it.

    The global random generator decides; turns that do not end within `MAX_USER_TOKENS`, or hold fewer than 4 tokens,
    are dropped, so that fewer than `n` may come back.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("self-instruct needs a tokenizer with a chat template; give --prompts instead.")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}], add_generation_prompt=True, tokenize=False
    )
    opening, closing = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in chat.split(MARKER, maxsplit=1)
    )
    turns = model.generate(
        torch.tensor([opening] * n, device=model.device),
        max_new_tokens=MAX_USER_TOKENS,
        eos_token_id=closing[0],
        pad_token_id=closing[0],
        **SELF_INSTRUCT_SAMPLING,
    )[:, len(opening) :].tolist()
    ended = (turn[: turn.index(closing[0])] for turn in turns if closing[0] in turn)
    return [opening + turn + closing for turn in ended if len(turn) >= 4]
