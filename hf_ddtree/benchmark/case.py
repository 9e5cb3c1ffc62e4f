"""One prompt at one temperature: what every method gets."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.prompts import tokenize
from .methods import Method
from .rows import Row


@dataclass(frozen=True)
class Case:
    """One prompt at one temperature, which every method answers with the same settings.

    Args:
        target: the enabled target.
        input_ids: `[1, S]` int64, the tokens of the prompt on the target's device.
        kind: the kind of the prompt.
        seed: seeds the sampling. It also decides which method answers first.
        temperature: the sampling temperature, 0 for greedy decoding.
        max_new_tokens: the largest number of new tokens.
    """

    target: PreTrainedModel
    input_ids: torch.Tensor
    kind: str
    seed: int
    temperature: float
    max_new_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `generate` that all methods share."""
        return generation_settings(self.temperature, self.max_new_tokens)

    def row(self, pass_name: str, method: Method) -> Row:
        """Return the columns that say what a row is about.

        Args:
            pass_name: "speed" or "timing".
            method: the method that answered.
        """
        return {
            "pass": pass_name,
            "kind": self.kind,
            "seed": self.seed,
            "temperature": self.temperature,
            "method": method.name,
            "tree_budget": method.tree_budget,
            "prompt_tokens": self.input_ids.shape[1],
        }


def prompt_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: dict[str, Any]) -> torch.Tensor:
    """Return the tokens of a prompt, `[1, S]` int64, on the target's device.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        prompt: `{"messages": [...], "kind": ...}`.
    """
    return torch.tensor([tokenize(tokenizer, prompt["messages"])], dtype=torch.long, device=target.device)


def generation_settings(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return the keyword arguments of `generate` that all methods share.

    Args:
        temperature: the sampling temperature, 0 for greedy decoding.
        max_new_tokens: the largest number of new tokens.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **sampling}
