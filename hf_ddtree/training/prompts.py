"""Prompts for training data and evaluation: from a file, from a dataset, or written by the target itself."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARKER = "\u241e"  # stands in for the user's words, to find what a chat template puts around them
MIN_USER_TOKENS = 4
MAX_USER_TOKENS = 96
SELF_INSTRUCT_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 50}


def read_prompts(source: str) -> list[dict[str, Any]]:
    """Read prompts as `{"messages": [...], "kind": ...}`.

    Args:
        source: a JSONL file, or the id of a dataset (this needs the package `datasets`). Each row has a "prompt" (text)
            or "messages" (chat), and optionally a "kind". Answers at the end of a chat are dropped.

    Raises:
        ValueError: for a line or an entry without a prompt. The message names the file and the line.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            rows = [_parse(line, source, number) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        from datasets import load_dataset

        rows = load_dataset(source, split="train")
    return [_as_messages(row, source, number) for number, row in enumerate(rows, 1)]


def _parse(line: str, source: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source}, line {number} is not JSON ({error}). "
            "Each line must be a JSON object with a text in 'prompt' or a chat in 'messages'."
        ) from error


def _as_messages(row: Any, source: str, number: int) -> dict[str, Any]:
    row = row if isinstance(row, dict) else {}
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
    # an answer in the data is not the target's own
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not all(isinstance(message.get("content"), str) for message in messages):
        raise ValueError(
            f"{source}, entry {number} has no prompt. Each entry must have a text in 'prompt' or a chat in 'messages'."
        )
    return {"messages": messages, "kind": row.get("kind", "all")}


def tokenize(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a prompt up to the beginning of the answer.

    Args:
        tokenizer: the target's. Without a chat template the messages are joined as plain text.
        messages: a chat in the format of `apply_chat_template`.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def self_instruct(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int) -> list[list[int]]:
    """Let the target write prompts: it gets the opening of a user turn and continues it.

    The global random generator draws the tokens.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        n: how many turns to generate.

    Returns:
        The tokens of at most `n` prompts. Turns that do not end within `MAX_USER_TOKENS`, or that have fewer than
        `MIN_USER_TOKENS` tokens, are dropped.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template, so the target cannot write a user's turn. Pass prompts with --prompts."
        )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}], add_generation_prompt=True, tokenize=False
    )
    opening, closing = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in chat.split(MARKER, maxsplit=1)
    )
    turns = model.generate(
        torch.tensor([opening] * n, dtype=torch.long, device=model.device),
        max_new_tokens=MAX_USER_TOKENS,
        eos_token_id=closing[0],
        pad_token_id=closing[0],
        **SELF_INSTRUCT_SAMPLING,
    )[:, len(opening) :].tolist()
    ended = (turn[: turn.index(closing[0])] for turn in turns if closing[0] in turn)
    return [opening + turn + closing for turn in ended if len(turn) >= MIN_USER_TOKENS]
