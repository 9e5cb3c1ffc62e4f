"""Verifying a tree in one target forward, and committing a path by keeping its rows of the cache."""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from ..tree import DraftTree
from .attention import TreeForward, no_router_logits, text_config
from .cache import Committed, commit_path, is_recurrent
from .gated_delta import TreeStates, gated_delta_patches
from .patching import patched


class TreeVerifier:
    """Verifies a tree in one target forward, and commits a path by keeping its rows of the cache.

    Args:
        model: the target.
        cache: its cache after the prefill.
        attention: the attention backend.
        taps: the hidden states that the drafter reads, as indices into `outputs.hidden_states`.
        committed: says how many tokens of the cache are final.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        attention: type[TreeForward],
        taps: tuple[int, ...],
        committed: Committed,
    ):
        self.model, self.cache, self.attention, self.taps, self.committed = model, cache, attention, taps, committed
        self.config = text_config(model)
        state_patches = gated_delta_patches(model)
        self.has_states = bool(state_patches)
        self.patches = attention.patches(model) + state_patches
        self.forward: TreeForward | None = None

    def verify(self, tree: DraftTree, model_kwargs: dict[str, Any]) -> ModelOutput:
        """Run one target forward over all nodes.

        The node at depth d stands at position (root's position) + d and sees the prefix, its ancestors and itself.

        Args:
            tree: N nodes, the root included, whose token is not in the cache yet.
            model_kwargs: `generate`'s keyword arguments for the forward. Their `position_ids` and `attention_mask` end
                with the root, and their `cache` ends before it.

        Returns:
            The model's outputs with logits `[1, N, V]`. Row i continues the prefix that ends in node i.
        """
        root = model_kwargs["position_ids"][..., -1:]
        states = TreeStates(tree) if self.has_states else None
        forward = self.attention(tree, self.config, self.committed.length, model_kwargs["attention_mask"], states)
        inputs = {
            **model_kwargs,
            "position_ids": root + tree.depths.to(root.device),
            "attention_mask": forward.masks(self.cache, root.device),
        }
        inputs = forward_inputs(self.model, tree.token_ids[None].to(root.device), inputs, self.taps)
        if self.patches:
            inputs["ddtree"] = forward
        self.forward = forward
        with patched(self.patches):
            return self.model(**inputs, return_dict=True)

    def commit(self, path: list[int]) -> None:
        """Keep the rows of a path and forget the other nodes of the last tree.

        Args:
            path: node indices from the root down.
        """
        forward = self.forward
        if forward is None:
            raise RuntimeError("commit needs a tree that was verified before")
        commit_path(self.cache, path, len(forward.tree))
        if forward.states is not None:
            recurrent_states = [layer.recurrent_states[0] for layer in self.cache.layers if is_recurrent(layer)]
            forward.states.commit(recurrent_states, path)
        self.committed.length += len(path)


def forward_inputs(
    model: PreTrainedModel, token_ids: torch.Tensor, inputs: dict[str, Any], taps: tuple[int, ...]
) -> dict[str, Any]:
    """Return the keyword arguments of a forward over more tokens than the one that `generate` prepares it for.

    Args:
        model: the target.
        token_ids: `[B, n]`.
        inputs: `generate`'s keyword arguments, with `position_ids` and `attention_mask` for these tokens.
        taps: the hidden states to return, as indices into `outputs.hidden_states`.
    """
    inputs = dict(inputs)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, -1:].expand_as(token_ids)
    if taps:
        inputs.setdefault("output_hidden_states", list(taps))
    inputs.update(no_router_logits(model))
    inputs = model.prepare_inputs_for_generation(token_ids, is_first_iteration=False, **inputs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = token_ids.shape[1]
    return inputs
