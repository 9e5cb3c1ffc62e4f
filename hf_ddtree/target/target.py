"""The target of one call: a model with its cache and inputs that runs the prompt, verifies trees and commits paths."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .._transformers import empty_cache, extend_model_kwargs, logits_to_keep, optimized_for_decoding
from ..tree import DraftTree
from .attention import MaskedForward, TreeForward, text_config
from .cache import uncommitted_rows
from .path_verifier import PathVerifier, is_path_by_path
from .prefill import prefill, tap, text_positions
from .tree_verifier import TreeVerifier


class Target:
    """A model with the cache, the inputs and the attention backend of one call.

    The sequence always ends with the root: the last emitted token, which is not in the cache yet. Trees and paths come
    in lists with one entry per row of the batch. Today a batch has one row.

    Args:
        model: the model that generates.
        model_kwargs: `generate`'s keyword arguments for the forward, among them `cache`, `attention_mask` and
            `position_ids`.
        attention: the attention backend.
        taps: the hidden states that the drafter reads, as indices into `outputs.hidden_states`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        attention: type[TreeForward] = MaskedForward,
        taps: tuple[int, ...] = (),
    ):
        self.model, self.model_kwargs, self.attention, self.taps = model, model_kwargs, attention, taps
        self.config = text_config(model)
        self._verifier: TreeVerifier | PathVerifier | None = None
        self._outputs: ModelOutput | None = None  # of the last verification

    @classmethod
    def after(
        cls, model: PreTrainedModel, token_ids: torch.Tensor, attention: type[TreeForward] = MaskedForward
    ) -> "Target":
        """Run tokens through the model, and return a target that continues them. For checks and measurements.

        Args:
            model: the model.
            token_ids: `[L]` int64, on the device of the model's inputs.
            attention: the attention backend.
        """
        cache = empty_cache(DynamicCache, text_config(model))
        positions = torch.arange(len(token_ids) + 1, dtype=torch.long, device=token_ids.device)[None]
        keep = logits_to_keep(model, 1)
        model(input_ids=token_ids[None], position_ids=positions[:, :-1], cache=cache, use_cache=True, **keep)
        inputs = {"cache": cache, "attention_mask": None, "position_ids": positions, "use_cache": True, **keep}
        return cls(model, inputs, attention)

    @property
    def cache(self) -> Cache:
        """The key/value cache, which ends before the root."""
        return self.model_kwargs["cache"]

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs. The model itself may be offloaded."""
        return self.model_kwargs["position_ids"].device

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model can embed."""
        return self.config.vocab_size

    def prefill(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig
    ) -> tuple[ModelOutput, torch.Tensor, torch.Tensor]:
        """Run the prompt, and move on to the token after it.

        Args:
            input_ids: `[1, S]` int64.
            generation_config: the settings of the call, for transformers' own prefill.

        Returns:
            The outputs of the last chunk, and what `Drafter.prefill` takes: the tapped states `[1, P, taps * H]` of the
            prompt tokens that ran, and their positions `[1, P]` int64, padding excluded.
        """
        outputs, states, positions = prefill(self.model, input_ids, generation_config, self.model_kwargs, self.taps)
        self.model_kwargs = extend_model_kwargs(self.model, outputs, self.model_kwargs, 1)
        return outputs, states, positions

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Verify and commit inside this context. When it ends, the cache is as plain `generate` leaves it."""
        with optimized_for_decoding(self.model):
            if is_path_by_path(self.model, self.cache):
                self._verifier = PathVerifier(self.model, self.cache, self.taps)
                yield
                return
            with uncommitted_rows(self.cache) as committed:
                self._verifier = TreeVerifier(self.model, self.cache, self.attention, self.taps, committed)
                yield

    def verify(self, trees: list[DraftTree]) -> ModelOutput:
        """Compute the logits of every node of the trees.

        Args:
            trees: one tree of N nodes per row.

        Returns:
            The model's outputs with logits `[B, N, V]`. Row i continues the prefix that ends in node i.
        """
        [tree] = trees
        self._outputs = self._in_decoding().verify(tree, self.model_kwargs)
        return self._outputs

    def commit(self, paths: list[list[int]]) -> list[torch.Tensor]:
        """Keep the accepted path of each tree in the cache, drop the other nodes, and move on to the next root.

        Args:
            paths: per row, node indices from the root down.

        Returns:
            Per row, the tapped states of the path, `[1, len(path), taps * H]`.
        """
        [path] = paths
        self._in_decoding().commit(path)
        self.model_kwargs = extend_model_kwargs(self.model, self._outputs, self.model_kwargs, len(path))
        return [tap(self._outputs, self.taps, rows=path)]

    def max_depth(self, room: int) -> int:
        """Return how deep a node may lie: within the room that is left, and at a position that the model has.

        Args:
            room: how many tokens the generation may still emit after the next one.
        """
        last_position = getattr(self.config, "max_position_embeddings", None)
        if last_position is None:
            return room
        left = last_position - 1 - int(text_positions(self.model_kwargs["position_ids"])[0, -1])
        # negative if the text is already beyond the last position, which works if positions are not learned
        return room if left < 0 else min(room, left)

    def _in_decoding(self) -> TreeVerifier | PathVerifier:
        if self._verifier is None:
            raise RuntimeError("verify and commit work inside `with target.decoding()`")
        return self._verifier
