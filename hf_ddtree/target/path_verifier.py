"""Verifying a tree path by path, for layers whose state has no tree form."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from ..tree import DraftTree, int64
from .cache import copy_cache, is_recurrent
from .gated_delta import gated_delta_patches
from .tree_verifier import forward_inputs

MAX_PATHS = 16  # root-to-leaf paths in one forward. Each has a copy of the cache.


def is_path_by_path(model: PreTrainedModel, cache: Cache) -> bool:
    """Return whether the model has layers with a state for which there is no tree form.

    Args:
        model: the target.
        cache: its cache. The types of its layers decide.
    """
    return any(map(is_recurrent, cache.layers)) and not gated_delta_patches(model)


class PathVerifier:
    """Verifies every root-to-leaf path as a sequence of its own, and commits a path by running it once more.

    This serves layers whose state cannot be rolled back by a token. The tokens near the root run once per leaf below
    them, and every path needs a copy of the cache. In return, any model that continues a cached text can be verified.

    Args:
        model: the target.
        cache: its cache after the prefill.
        taps: the hidden states that the drafter reads, as indices into `outputs.hidden_states`.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, taps: tuple[int, ...]):
        self.model, self.cache, self.taps = model, cache, taps
        self.verified: tuple[DraftTree, dict[str, Any]] | None = None  # the last tree and its keyword arguments

    def verify(self, tree: DraftTree, model_kwargs: dict[str, Any]) -> ModelOutput:
        """Run target forwards over all root-to-leaf paths.

        Args:
            tree: N nodes, the root included, whose token is not in the cache yet.
            model_kwargs: `generate`'s keyword arguments for the forward. Their `position_ids` and `attention_mask` end
                with the root, and their `cache` ends before it.

        Returns:
            The outputs of one forward over the tree: logits `[1, N, V]`, where row i continues the prefix that ends in
            node i, the hidden states that were asked for, and the cache.
        """
        self.verified = tree, model_kwargs
        forwards, place = [], [0] * len(tree)
        for paths, first in _groups(tree):
            outputs = self._forward(paths, self._branches(len(paths), model_kwargs), self.taps)
            width = outputs.logits.shape[1]
            for row, path in enumerate(paths):
                for depth, node in enumerate(path):  # a node on several paths has the same result on each
                    place[node] = first + row * width + depth
            forwards.append(outputs)
        return self._collect(forwards, place)

    def commit(self, path: list[int]) -> None:
        """Commit a path of the last tree by a forward over it.

        Args:
            path: node indices from the root down.
        """
        self._forward([path], self.cache, taps=())

    def _branches(self, n: int, model_kwargs: dict[str, Any]) -> Cache:
        """Return a copy of the cache with `n` equal rows."""
        branches = copy_cache(self.cache)
        branches.reorder_cache(torch.zeros(n, dtype=torch.long, device=model_kwargs["position_ids"].device))
        return branches

    def _collect(self, forwards: list[ModelOutput], place: list[int]) -> ModelOutput:
        """Return the outputs of the nodes, out of the rows and columns of several forwards."""

        def of_nodes(states: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat([state.flatten(0, 1) for state in states])[place][None]

        collected: dict[str, Any] = {"logits": of_nodes(outputs.logits for outputs in forwards)}
        if "cache" in forwards[0]:  # the outputs of some models have no such field
            collected["cache"] = self.cache
        if forwards[0].get("hidden_states") is not None:
            layers = zip(*(outputs.hidden_states for outputs in forwards), strict=True)
            collected["hidden_states"] = tuple(None if states[0] is None else of_nodes(states) for states in layers)
        return type(forwards[0])(**collected)

    def _forward(self, paths: list[list[int]], cache: Cache, taps: tuple[int, ...]) -> ModelOutput:
        """Run a causal forward over some paths of the tree, `[len(paths), longest path]`, padded at the right."""
        if self.verified is None:
            raise RuntimeError("commit needs a tree that was verified before")
        tree, model_kwargs = self.verified
        n = max(map(len, paths))
        position_ids, mask = model_kwargs["position_ids"], model_kwargs["attention_mask"]
        rows = int64([node for path in paths for node in path + [0] * (n - len(path))]).view(len(paths), n)
        positions = position_ids[..., -1:] + torch.arange(n, dtype=torch.long, device=position_ids.device)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, n - 1), value=1).expand(len(paths), -1)
        inputs = {
            **model_kwargs,
            "cache": cache,
            "position_ids": positions.expand(*positions.shape[:-2], len(paths), n),
            "attention_mask": mask,
        }
        node_ids = tree.token_ids[rows].to(position_ids.device)
        return self.model(**forward_inputs(self.model, node_ids, inputs, taps), return_dict=True)


def _groups(tree: DraftTree) -> Iterator[tuple[list[list[int]], int]]:
    """Yield groups of at most `MAX_PATHS` root-to-leaf paths, each with the number of places before it.

    A forward over a group has one place per path and depth, up to the depth of its longest path.
    """
    leaves = sorted(set(range(len(tree))) - set(tree.parents.tolist()))
    first = 0
    for start in range(0, len(leaves), MAX_PATHS):
        paths = [tree.path_to(leaf) for leaf in leaves[start : start + MAX_PATHS]]
        yield paths, first
        first += len(paths) * max(map(len, paths))
