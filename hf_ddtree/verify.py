"""Target forwards: prefill of the prompt, and verification of a whole tree at once."""

from threading import get_ident

import torch
from transformers.utils import ModelOutput

from .attention import tree_attention_mask
from .tree import DraftTree


def prefill(model, input_ids, generation_config, model_kwargs, tapped_states: tuple[int, ...]):
    """Run the prompt through the target as plain `generate` does, in chunks if asked for.

    Args:
        model: the target.
        input_ids: `[1, S]` int64.
        generation_config: the request's; `prefill_chunk_size` is honoured.
        model_kwargs: `generate`'s keyword arguments for the forward; updated for the first new token.
        tapped_states: the hidden states the drafter reads, as indices into `outputs.hidden_states`.

    Returns:
        The outputs of the last chunk, and the drafter's context: the tapped states `[1, P, taps * H]` and positions
        `[1, P]` of ALL prompt tokens that ran, padding excluded; empty without taps.
    """
    captured = []
    thread = get_ident()

    def capture(module, args, outputs):
        if get_ident() == thread:  # other threads may be generating with the same model
            captured.append(tap(outputs, tapped_states))

    request = model_kwargs
    if tapped_states:
        # an index list keeps only those states; a user who asked for all of them gets all
        request = {"output_hidden_states": list(tapped_states), **model_kwargs}
    # a hook, because chunked prefill returns the last chunk's outputs only
    handle = model.register_forward_hook(capture)
    try:
        outputs = model._prefill(input_ids, generation_config, request)
    finally:
        handle.remove()
    states = torch.cat(captured, dim=1)
    n = states.shape[1]
    positions = model_kwargs["position_ids"][:, -n:]
    if tapped_states and model_kwargs["attention_mask"] is not None:
        valid = model_kwargs["attention_mask"][0, -n:].bool()
        states, positions = states[:, valid.to(states.device)], positions[:, valid]
    return outputs, (states, positions)


def verify_tree(model, tree: DraftTree, model_kwargs: dict, tapped_states: tuple[int, ...] = ()) -> ModelOutput:
    """One target forward over all nodes: logits `[1, N, V]`, where row i continues the prefix that ends in node i.

    The node at depth d stands at position (root's position) + d and sees the prefix, its ancestors and itself.

    Args:
        model: the target.
        tree: N nodes, the root included: the last emitted token is not in the cache yet.
        model_kwargs: `generate`'s keyword arguments, whose `position_ids` and `attention_mask` end with the root and
            whose `cache` ends before it.
        tapped_states: indices into `outputs.hidden_states` that the drafter reads.
    """
    device = model_kwargs["position_ids"].device
    depths = tree.depths.to(device)
    inputs = {
        **model_kwargs,
        "position_ids": model_kwargs["position_ids"][..., -1:] + depths,
        "attention_mask": tree_attention_mask(
            model.config.get_text_config(decoder=True),
            model_kwargs["cache"],
            depths,
            depths,
            tree.ancestor_mask,
            padding_mask=model_kwargs["attention_mask"],
            dtype=model.dtype,
            device=device,
        ),
    }
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = len(tree)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, -1:].expand(-1, len(tree))
    if tapped_states:
        inputs.setdefault("output_hidden_states", list(tapped_states))
    node_ids = tree.token_ids[None].to(device)
    inputs = model.prepare_inputs_for_generation(node_ids, is_first_iteration=False, **inputs)
    return model(**inputs, return_dict=True)


def tap(outputs: ModelOutput, tapped_states: tuple[int, ...], rows: list[int] | slice = slice(None)) -> torch.Tensor:
    """The tapped hidden states of some rows, side by side: `[1, len(rows), taps * H]`; empty without taps."""
    if not tapped_states:
        return outputs.logits.new_empty(1, 0, 0)
    if outputs.get("hidden_states") is None:
        raise ValueError("assistant_model: this drafter reads hidden states, which the target does not return.")
    states = [outputs.hidden_states[index][:, rows] for index in tapped_states]
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)


def count_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """The number of padding tokens at the left of `input_ids`, whose mask is the end of `attention_mask`."""
    n = input_ids.shape[1]
    return 0 if attention_mask is None or n == 0 else int(attention_mask[0, -n:].argmax())


def deepest_node(model, room: int, position_ids: torch.Tensor) -> int:
    """How deep a node may lie: within the room that is left, and on a position the model has.

    Args:
        room: tokens the generation may still emit after the next one.
        position_ids: `[1, S]`, ending with the root's.
    """
    last_position = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    left = room if last_position is None else last_position - 1 - int(position_ids[0, -1])
    # plain generate only gets beyond the last position where positions are not learned
    return room if left < 0 else min(room, left)
