"""The prompts that the measuring scripts share."""

import json
from pathlib import Path

from transformers import BatchEncoding, PreTrainedTokenizerBase


def read_questions() -> list[str]:
    """Return the 24 questions of prompts.jsonl."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def chat_inputs(tokenizer: PreTrainedTokenizerBase, question: str) -> BatchEncoding:
    """Return the inputs of `generate` for a chat with one question.

    Args:
        tokenizer: the target's tokenizer, with a chat template.
        question: the user's message.
    """
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
