"""A tokenizer with chosen token texts, and short ways to fill in a form and run it."""

from dataclasses import dataclass, field

import torch

from hf_ddtree.demo import Comparison, Form, Loaded, StopSwitch, compare
from hf_ddtree.testing import VOCAB_SIZE

HOSTILE = "</text><script>alert(1)</script>${1+1}{{value}}&amp;\"'`\x00\x1b\u202e\u200b\ufffe\ud800🙂שלום"
REPETITIVE = "abcabcabcabcabc"


@dataclass
class Letters:
    """A tokenizer with one character per token. `texts` replaces the text of some tokens."""

    texts: dict[int, str] = field(default_factory=dict)
    chat_template: str | None = None

    def __call__(self, text: str, return_tensors: str) -> "LettersEncoding":
        ids = torch.tensor([[ord(character) % VOCAB_SIZE for character in text]])
        return LettersEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.texts.get(token, chr(token)) for token in token_ids)


class LettersEncoding(dict):
    """What `Letters` returns: a BatchEncoding without its other methods."""

    def to(self, device: torch.device) -> "LettersEncoding":
        return self


def ask(text: str = REPETITIVE, **options) -> Form:
    """Return a form with one message, 24 new tokens and a tree budget of 8."""
    return Form([{"role": "user", "content": text}], **{"max_new_tokens": 24, "tree_budget": 8, **options})


def finish(loaded: Loaded, form: Form, switch: StopSwitch | None = None) -> Comparison:
    """Return the last state of the comparison."""
    *_, last = compare(loaded, form, switch or StopSwitch())
    return last
