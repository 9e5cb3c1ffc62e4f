"""Loading the target and its drafters for the page, and warming them up."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..embedded import EMBEDDED, load_models
from ..enable import enable
from ..messages import quoted

DTYPES = ("float32", "bfloat16")
DRAFTER = "drafter"
PROMPT_LOOKUP = "prompt look-up"


@dataclass(frozen=True)
class Loaded:
    """An enabled target, its tokenizer, and its drafters by name. The drafter None means prompt look-up."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, PreTrainedModel | None]


class Models:
    """Load the models in the dtype that is asked for, and keep them until another dtype is asked for.

    Args:
        model: path or Hub id of the target, or "embedded".
        assistant_model: path or Hub id of a drafter. None means the embedded model's own drafter for the embedded
            model, and prompt look-up alone for any other model.
    """

    def __init__(self, model: str = EMBEDDED, assistant_model: str | None = None) -> None:
        self.model, self.assistant_model = model, assistant_model
        self.dtype: str | None = None
        self.loaded: Loaded | None = None
        # set by the first `get`; stays while another dtype is loaded, so that the page can still show its texts
        self.tokenizer: PreTrainedTokenizerBase

    @property
    def drafter_label(self) -> str:
        """The name of the loaded drafter on the page."""
        return self.assistant_model or "trained DFlash"

    def get(self, dtype: str) -> Loaded:
        """Return the models in `dtype`, and load them first if they are loaded in another dtype.

        Args:
            dtype: a name from `DTYPES`.

        Raises:
            ValueError: if `dtype` is not in `DTYPES`.
        """
        if dtype not in DTYPES:
            raise ValueError(f"The dtype {quoted(dtype)} is unknown. Choose one of {', '.join(DTYPES)}.")
        if self.loaded is None or dtype != self.dtype:
            self.loaded = self.dtype = None  # frees the memory: only one copy of the models fits for sure
            self.loaded, self.dtype = self._load(getattr(torch, dtype)), dtype
            self.tokenizer = self.loaded.tokenizer
        return self.loaded

    def _load(self, dtype: torch.dtype) -> Loaded:
        model, tokenizer, drafter = load_models(self.model, self.assistant_model, dtype)
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        drafters = {} if drafter is None else {DRAFTER: drafter.to(model.device)}
        loaded = Loaded(enable(model.eval()), tokenizer, {**drafters, PROMPT_LOOKUP: None})
        warm_up(loaded)
        return loaded


def warm_up(loaded: Loaded) -> None:
    """Generate a few tokens plainly and with each drafter, because the first call pays for checks and allocations."""
    prompt = torch.tensor([[1, 2, 3]], dtype=torch.long, device=loaded.model.device)
    trees = [{"assistant_model": drafter, "tree_budget": 16} for drafter in loaded.drafters.values()]
    choices: list[dict[str, Any]] = [{}, *trees]
    for options in choices:
        loaded.model.generate(prompt, do_sample=False, max_new_tokens=8, **options)
