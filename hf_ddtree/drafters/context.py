"""What a drafter has read of a text, kept from one turn of a chat to the next.

A turn that continues a filled cache runs the new tokens only. A drafter that received nothing else would draft from a
fraction of the text. Every call therefore takes the context that the last call with the same cache and the same drafter
has left, and leaves its own at the end. While a call runs, no other call can take its context. A call that fails leaves
none.

Both keys are weak, and a context refers to neither the target's cache nor a model. It therefore lives no longer than
both. It is no attribute of the cache, because a returned cache must not hold more than that of plain `generate`.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .._transformers import cached_tokens, crop_rows
from ..target.prefill import text_positions

_contexts: WeakKeyDictionary = WeakKeyDictionary()  # the target's cache -> the drafter's model -> Context

Text = tuple[torch.Tensor, torch.Tensor]  # token ids `[n]` and positions `[n]`, both int64 and on the CPU
NO_TOKENS = torch.zeros(0, dtype=torch.long, device="cpu")


@dataclass(eq=False)
class Context:
    """What a drafter has read of a text. The text is all tokens of the conversation without padding, counted from 0.

    Args:
        cache: the drafter's own keys and values. The drafter makes it if there is none.
        pending: target states `[1, n, taps * H]` and positions `[1, n]` of tokens that are not in this cache yet.
        rows: the tokens of the text that the cache and then `pending` hold, ascending. Tokens that others added to the
            target's cache may be missing.
        n_cached: how many tokens of the text the target's cache held when the call began.
        before: `[h]` int64, the tokens before `input_ids`, if the call received the new tokens only.
        text: the text in the target's cache when the last call ended.
        placement: the dtype and the device of the drafter's model at that time.
    """

    cache: Any = None
    pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    n_cached: int = 0
    before: torch.Tensor = NO_TOKENS
    text: Text = (NO_TOKENS, NO_TOKENS)
    placement: tuple[torch.dtype, torch.device] | None = None

    def crop(self, n_tokens: int) -> bool:
        """Forget everything after the first tokens of the text, and return whether the drafter's cache allowed it.

        Args:
            n_tokens: how many tokens of the text to keep.
        """
        n_rows, in_cache = bisect_left(self.rows, n_tokens), cached_tokens(self.cache)
        surplus = max(0, in_cache - n_rows)
        if not all(_can_crop(layer, surplus) for layer in self.cache.layers):
            return False
        for layer in self.cache.layers if surplus else ():
            crop_rows(layer, surplus)
        if self.pending:
            states, positions = (torch.cat(parts, dim=1) for parts in zip(*self.pending, strict=True))
            n_pending = max(0, n_rows - in_cache)
            self.pending = [(states[:, :n_pending], positions[:, :n_pending])]
        self.rows = self.rows[:n_rows]
        return True


def take_context(assistant_model: object, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Context:
    """Return what the drafter has read of the text in the target's cache, at the start of a call.

    The user may have cropped the cache, extended it without this drafter, or started another text in it. The context is
    therefore cropped to the tokens that the kept text and the cached text share. It is empty if there are none.

    Args:
        assistant_model: what the user passed. Only for a model is anything kept.
        input_ids: `[1, S]` int64, the whole text, or only the tokens that are not cached yet.
        model_kwargs: `generate`'s keyword arguments for the target's forward.
    """
    kept = Context()
    if isinstance(assistant_model, PreTrainedModel):
        kept = _contexts.get(model_kwargs["cache"], {}).pop(assistant_model, kept)
        if kept.placement != (assistant_model.dtype, assistant_model.device):
            kept = Context()
    only_new = model_kwargs["position_ids"].shape[-1] > input_ids.shape[1]
    before = kept.text[0] if only_new else NO_TOKENS
    text = _cached_text(input_ids, model_kwargs, before)
    if text is None:
        return Context()
    if kept.cache is None or not kept.crop(_shared_length(kept.text, text)):
        kept = Context()
    kept.n_cached, kept.before = len(text[0]), before
    return kept


def keep_context(
    context: Context, assistant_model: object, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> None:
    """Keep what the drafter has read for the next call with the same cache, at the end of a call.

    Args:
        context: what the drafter has read. It is empty if the drafter needs `input_ids` only.
        assistant_model: what the user passed.
        input_ids: `[1, S]` int64, the finished sequence. The target's cache holds all of it but the last token.
        model_kwargs: `generate`'s keyword arguments for the target's next forward.
    """
    text = _cached_text(input_ids, model_kwargs, context.before)
    if text is None or context.cache is None or not isinstance(assistant_model, PreTrainedModel):
        return
    context.text, context.placement = text, (assistant_model.dtype, assistant_model.device)
    _contexts.setdefault(model_kwargs["cache"], WeakKeyDictionary())[assistant_model] = context


def _cached_text(input_ids: torch.Tensor, model_kwargs: dict[str, Any], before: torch.Tensor) -> Text | None:
    """Return the text in the target's cache without padding, or None if its tokens are not known.

    They are not if the prompt was given as embeddings, or if the cache was filled by others before a call that received
    the new tokens only.
    """
    mask, positions = model_kwargs["attention_mask"], text_positions(model_kwargs["position_ids"])[0].cpu()
    n_padding = 0 if mask is None else int((mask[0] != 0).int().argmax())
    n_before = len(positions) - input_ids.shape[1]
    positions = positions[n_padding:]
    token_ids = torch.cat([before, input_ids[0, max(0, n_padding - n_before) :].cpu()])
    n_cached = max(0, cached_tokens(model_kwargs["cache"]) - n_padding)
    if len(token_ids) != len(positions) or n_cached >= len(positions):
        return None
    return token_ids[:n_cached], positions[:n_cached]


def _shared_length(text: Text, other: Text) -> int:
    """Return how many tokens two texts share from the start, at the same positions."""
    n = min(len(text[0]), len(other[0]))
    equal = (text[0][:n] == other[0][:n]) & (text[1][:n] == other[1][:n])
    return int(equal.long().cumprod(dim=0).sum())


def _can_crop(layer, n_rows: int) -> bool:
    """Return whether a layer still holds every row that it needs after its last `n_rows` rows are dropped."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or n_rows == 0:
        return True
    needed = min(layer.get_seq_length() - n_rows, layer.sliding_window - 1)
    return layer.keys.shape[-2] - n_rows >= needed
