"""Running the prompt through the target, and collecting the hidden states that the drafter reads."""

import inspect
from threading import get_ident
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .._transformers import cached_tokens, run_prefill


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    taps: tuple[int, ...],
) -> tuple[ModelOutput, torch.Tensor, torch.Tensor]:
    """Run the prompt through the target as plain `generate` does, in chunks if the settings ask for them.

    Args:
        model: the target.
        input_ids: `[1, S]` int64.
        generation_config: the settings of the call, for transformers' own prefill.
        model_kwargs: `generate`'s keyword arguments for the forward.
        taps: the hidden states that the drafter reads, as indices into `outputs.hidden_states`.

    Returns:
        The outputs of the last chunk; the tapped states of all prompt tokens that ran, `[1, P, taps * H]`, padding
        excluded; and their positions, `[1, P]` int64. Without taps, the states have no channels.
    """
    captured = []
    thread = get_ident()

    def capture(module, args, kwargs, outputs):
        if get_ident() == thread:  # other threads may be generating with the same model
            # without taps, the outputs do not show how many tokens ran
            embeds, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
            n_tokens = (ids if embeds is None else embeds).shape[1]
            captured.append(tap(outputs, taps) if taps else outputs.logits.new_empty(1, n_tokens, 0))

    inputs = model_kwargs
    if taps:
        # a list of indices keeps only those states. A user who asked for all of them gets all.
        inputs = {"output_hidden_states": list(taps), **model_kwargs}
    # a hook, because a prefill in chunks returns the outputs of the last chunk only
    handle = model.register_forward_hook(capture, with_kwargs=True)
    try:
        outputs = run_prefill(model, input_ids, generation_config, inputs)
    finally:
        handle.remove()
    states = torch.cat(captured, dim=1)
    n = states.shape[1]
    positions = text_positions(model_kwargs["position_ids"])[:, -n:]
    if model_kwargs["attention_mask"] is not None:
        valid = model_kwargs["attention_mask"][0, -n:].bool()
        states, positions = states[:, valid.to(states.device)], positions[:, valid]
    return outputs, states, positions


def tap(outputs: ModelOutput, taps: tuple[int, ...], rows: list[int] | slice = slice(None)) -> torch.Tensor:
    """Return the tapped hidden states of some rows side by side, `[1, n, taps * H]`. Without taps, they are empty.

    Args:
        outputs: the outputs of a target forward.
        taps: indices into `outputs.hidden_states`.
        rows: the rows to return.

    Raises:
        ValueError: if the target returned no hidden states.
    """
    if not taps:
        return outputs.logits[:, rows, :0]
    if outputs.get("hidden_states") is None:
        raise ValueError(
            "assistant_model: this drafter reads hidden states, which the target does not return; choose another "
            "drafter."
        )
    states = [outputs.hidden_states[index] for index in taps]
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)[:, rows]


def with_default_positions(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments with the positions that the model counts for itself, if `generate` made none.

    `generate` makes none if the forward hides its parameters, as a wrapper `forward(*args, **kwargs)` does. The model
    then counts the tokens, and the nodes of a tree need to be told the same positions. Without padding, all models
    count alike. With padding, or if the model takes no positions, the arguments stay as they are.

    Args:
        model: the target.
        input_ids: `[1, S]` int64, the prompt.
        model_kwargs: `generate`'s keyword arguments for the forward.
    """
    if model_kwargs.get("position_ids") is not None or model_kwargs.get("cache") is None or not _takes_positions(model):
        return model_kwargs
    mask, embeds = model_kwargs["attention_mask"], model_kwargs.get("inputs_embeds")
    if mask is not None and not bool((mask != 0).all()):
        return model_kwargs
    whole = embeds if mask is None else mask  # the cached tokens included
    length = cached_tokens(model_kwargs["cache"]) + input_ids.shape[1] if whole is None else whole.shape[1]
    positions = torch.arange(length, dtype=torch.long, device=input_ids.device)
    return {**model_kwargs, "position_ids": positions[None].expand(len(input_ids), -1)}


def _takes_positions(model: PreTrainedModel) -> bool:
    forwards = [vars(ancestor)["forward"] for ancestor in type(model).__mro__ if "forward" in vars(ancestor)]
    return any("position_ids" in inspect.signature(forward).parameters for forward in forwards)


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions in the text, `[1, S]`. They come first where a model also has positions in images.

    Args:
        position_ids: `[1, S]`, or `[rows, 1, S]`.
    """
    return position_ids if position_ids.dim() == 2 else position_ids[0]
