"""What a visitor asks for: the page's limits and the arguments of `generate`."""

from dataclasses import dataclass
from typing import Any, Self

from transformers import BatchEncoding

from ..messages import quoted
from ..request import MAX_TREE_BUDGET
from ..sampling.policies import POLICIES
from .models import PROMPT_LOOKUP, Loaded

MAX_PROMPT_CHARACTERS = 4_000
MAX_PROMPT_TOKENS = 2_048  # for the whole conversation
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the arguments of `generate`, the seed, and the sampling policy of DDTree.

    Raises:
        ValueError: if a value is out of range or the policy is unknown. The message names it.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 50
    seed: int = 0
    policy: str = "target"

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.05, 5)
        _check_range("top-p", self.top_p, 0.01, 1)
        _check_range("top-k", self.top_k, 0, 1_000)
        _check_range("seed", self.seed, 0, 2**32 - 1)
        if self.policy not in POLICIES:
            raise ValueError(f"The policy {quoted(self.policy)} is unknown. Choose one of {', '.join(POLICIES)}.")


@dataclass(frozen=True)
class Form:
    """One prompt and the settings with which plain generation and DDTree answer it.

    Args:
        messages: the conversation, each message `{"role": ..., "content": ...}`. The last message is the prompt.
        max_new_tokens: the maximum length of each answer.
        tree_budget: drafted nodes per round, or "auto".
        drafter: a key of `Loaded.drafters`.
        repetition_penalty: the argument of `generate`; 1.0 means no penalty.
        sampling: None for greedy decoding.

    Raises:
        ValueError: if the prompt is empty or too long, or a value is out of range. The message names it.
    """

    messages: list[dict[str, str]]
    max_new_tokens: int = 128
    tree_budget: int | str = 16
    drafter: str = PROMPT_LOOKUP
    repetition_penalty: float = 1.0
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        prompt = self.messages[-1]["content"]
        if not prompt.strip():
            raise ValueError("The prompt is empty. Type a prompt or choose an example.")
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise ValueError(
                f"The prompt has {len(prompt)} characters, but the page accepts at most {MAX_PROMPT_CHARACTERS}. "
                "Shorten the prompt."
            )
        _check_range("max new tokens", self.max_new_tokens, 1, MAX_NEW_TOKENS)
        _check_range("repetition penalty", self.repetition_penalty, 0.5, 2)
        if self.tree_budget != "auto":
            _check_range("tree budget", self.tree_budget, 1, MAX_TREE_BUDGET)

    @classmethod
    def from_controls(cls, messages: list[dict[str, str]], values: dict[str, Any]) -> Self:
        """Return the form that the controls of the page fill in.

        Args:
            messages: the conversation, with the prompt as its last message.
            values: the fields of `Form`, and "auto_budget", which replaces the tree budget if it is true. With
                "policy" among them tokens are sampled, and all further fields of `Sampling` must be there too.
        """
        names = ("policy", "temperature", "top_p", "top_k", "seed")
        sampling = Sampling(**{name: values[name] for name in names}) if "policy" in values else None
        return cls(
            messages,
            max_new_tokens=values["max_new_tokens"],
            tree_budget="auto" if values["auto_budget"] else values["tree_budget"],
            drafter=values["drafter"],
            repetition_penalty=values["repetition_penalty"],
            sampling=sampling,
        )

    @property
    def policy(self) -> str | None:
        """The sampling policy in use, or None for greedy decoding.

        With prompt look-up the policy is always "target", because prompt look-up has no distribution to draw from.
        """
        if self.sampling is None:
            return None
        return "target" if self.drafter == PROMPT_LOOKUP else self.sampling.policy

    @property
    def seed(self) -> int:
        """The seed of both runs; 0 for greedy decoding."""
        return 0 if self.sampling is None else self.sampling.seed

    def inputs(self, loaded: Loaded) -> BatchEncoding:
        """Return the tokenized conversation, on the target's device.

        Raises:
            ValueError: if the conversation is longer than the page or the target allows.
        """
        tokenizer = loaded.tokenizer
        if tokenizer.chat_template is None:
            inputs = tokenizer("\n".join(message["content"] for message in self.messages), return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        length, room = inputs["input_ids"].shape[1], self._room(loaded)
        if length > room:
            raise ValueError(
                f"The conversation has {length} tokens, but at most {room} fit. Start a new conversation with Run, or "
                "shorten the prompt."
            )
        return inputs.to(loaded.model.device)

    def _room(self, loaded: Loaded) -> int:
        """Return how many tokens the conversation may have, so that the answer still fits into the target's context."""
        positions = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return MAX_PROMPT_TOKENS if not positions else min(MAX_PROMPT_TOKENS, positions - self.max_new_tokens)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `generate` that both runs share."""
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "return_dict_in_generate": True,
            "do_sample": self.sampling is not None,
        }
        if self.sampling is not None:
            settings |= {name: getattr(self.sampling, name) for name in ("temperature", "top_p", "top_k")}
        return settings

    def tree_options(self, loaded: Loaded) -> dict[str, Any]:
        """Return the further arguments of `generate` that turn DDTree on."""
        options = {
            "assistant_model": loaded.drafters[self.drafter],
            "tree_budget": self.tree_budget,
            "tree_trace": True,
        }
        return options if self.policy is None else {**options, "tree_sampling": self.policy}


def _check_range(name: str, value: Any, minimum: float, maximum: float) -> None:
    """Raise a ValueError that names the field unless `value` is a number from `minimum` to `maximum`."""
    # negated, so that NaN is refused; None is what an empty field of the page gives
    if value is None or not minimum <= value <= maximum:
        raise ValueError(f"The {name} must be from {minimum} to {maximum}, but it is {value}.")
