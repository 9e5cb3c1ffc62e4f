"""The model behind the page, loaded and warmed up."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..drafters import load_drafter
from ..embedded import load_embedded
from ..generate import enable

EMBEDDED = "embedded"
DTYPES = ("float32", "bfloat16")
DRAFTER = "drafter"
PROMPT_LOOKUP = "prompt look-up"


@dataclass(frozen=True)
class Loaded:
    """A model that generates plainly and with a tree, its tokenizer, and its drafters by name."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, PreTrainedModel | None]


class Models:
    """Loads one model in the dtype asked for, and keeps it until another dtype is asked for.

    Args:
        model: path or Hub id of the target, or "embedded".
        assistant_model: path or Hub id of a drafter; without one, the embedded model's own, if it has one.
    """

    def __init__(self, model: str = EMBEDDED, assistant_model: str | None = None):
        self.model, self.assistant_model = model, assistant_model
        self.dtype = self.loaded = None
        self.tokenizer = None  # stays while another dtype is loaded

    @property
    def drafter_label(self) -> str:
        """What the drafter that was loaded is called."""
        return "trained DFlash" if self.model == EMBEDDED and self.assistant_model is None else self.assistant_model

    def get(self, dtype: str) -> Loaded:
        """The model in `dtype`, a name of `DTYPES`."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is unknown; choose one of {DTYPES}.")
        if dtype != self.dtype:
            self.loaded = self.dtype = None  # one copy in memory at a time
            self.loaded, self.dtype = self._load(getattr(torch, dtype)), dtype
            self.tokenizer = self.loaded.tokenizer
        return self.loaded

    def _load(self, dtype: torch.dtype) -> Loaded:
        if self.model == EMBEDDED:
            model, tokenizer, drafter = load_embedded(dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
            tokenizer, drafter = AutoTokenizer.from_pretrained(self.model), None
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        if self.assistant_model is not None:
            drafter = load_drafter(self.assistant_model, dtype=dtype)
        drafters = {} if drafter is None else {DRAFTER: drafter.to(model.device)}
        loaded = Loaded(enable(model.eval()), tokenizer, {**drafters, PROMPT_LOOKUP: None})
        warm_up(loaded)
        return loaded


def warm_up(loaded: Loaded) -> None:
    """Generate a few tokens each way: the first call of each pays for checks and allocations."""
    prompt = torch.tensor([[1, 2, 3]], device=loaded.model.device)
    trees = [{"assistant_model": drafter, "tree_budget": 16} for drafter in loaded.drafters.values()]
    for options in ({}, *trees):
        loaded.model.generate(prompt, do_sample=False, max_new_tokens=8, **options)
