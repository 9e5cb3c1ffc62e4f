"""What a visitor asks for, checked: the caps of the page and the arguments of `generate`."""

from dataclasses import dataclass

from transformers import BatchEncoding

from ..config import LARGEST_BUDGET
from ..tree import POLICIES
from .models import PROMPT_LOOKUP, Loaded

MAX_PROMPT_CHARACTERS = 4_000
MAX_PROMPT_TOKENS = 2_048  # the whole conversation
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 50
    seed: int = 0
    policy: str = "target"

    def __post_init__(self):
        _check("temperature", self.temperature, 0.05, 5)
        _check("top-p", self.top_p, 0.01, 1)
        _check("top-k", self.top_k, 0, 1_000)
        _check("seed", self.seed, 0, 2**32 - 1)
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is unknown; choose one of {tuple(POLICIES)}.")


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it, both plainly and with a tree.

    Args:
        messages: the conversation, `{"role": ..., "content": ...}`; the last message is the prompt.
        tree_budget: drafted nodes per round, or "auto".
        drafter: a key of `Loaded.drafters`.
        sampling: None for greedy decoding.

    Raises:
        ValueError: naming what is out of bounds.
    """

    messages: list[dict]
    max_new_tokens: int = 128
    tree_budget: int | str = 16
    drafter: str = PROMPT_LOOKUP
    repetition_penalty: float = 1.0
    sampling: Sampling | None = None

    def __post_init__(self):
        prompt = self.messages[-1]["content"]
        if not prompt.strip():
            raise ValueError("The prompt is empty. Type something, or pick an example.")
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise ValueError(f"The prompt has {len(prompt)} characters; the page takes {MAX_PROMPT_CHARACTERS}.")
        _check("max new tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS)
        _check("repetition penalty", self.repetition_penalty, 0.5, 2)
        if self.tree_budget != "auto":
            _check("budget", self.tree_budget, 1, LARGEST_BUDGET)

    @property
    def policy(self) -> str | None:
        """The sampling policy in force: None if greedy. Prompt look-up has no distribution to draw from."""
        if self.sampling is None:
            return None
        return "target" if self.drafter == PROMPT_LOOKUP else self.sampling.policy

    def inputs(self, loaded: Loaded) -> BatchEncoding:
        """The tokenized conversation, on the model's device."""
        tokenizer = loaded.tokenizer
        if tokenizer.chat_template is None:
            inputs = tokenizer("\n".join(message["content"] for message in self.messages), return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        length = inputs["input_ids"].shape[1]
        positions = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        most = min(MAX_PROMPT_TOKENS, (positions or MAX_PROMPT_TOKENS + self.max_new_tokens) - self.max_new_tokens)
        if length > most:
            raise ValueError(f"The conversation has {length} tokens; there is room for {most}. Start a new one.")
        return inputs.to(loaded.model.device)

    def settings(self) -> dict:
        """The arguments of `generate` that both runs share."""
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "return_dict_in_generate": True,
            "do_sample": self.sampling is not None,
        }
        if self.sampling is not None:
            names = ("temperature", "top_p", "top_k")
            settings |= {name: getattr(self.sampling, name) for name in names}
        return settings

    def tree_options(self, loaded: Loaded) -> dict:
        """The arguments of `generate` that make it decode with a tree."""
        options = {
            "assistant_model": loaded.drafters[self.drafter],
            "tree_budget": self.tree_budget,
            "tree_trace": True,
        }
        return options if self.policy is None else {**options, "tree_sampling": self.policy}


def _check(name: str, value: float, least: float, most: float) -> None:
    if value is None or not least <= value <= most:
        raise ValueError(f"{name}: {value} is not from {least} to {most}.")
