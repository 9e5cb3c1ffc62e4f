"""What tree decoding returns beside the tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .request import Request
from .target.cache import own_storage
from .target.timing import now
from .tree import DraftTree
from .walk import Emitter


@dataclass
class Round:
    """One round of tree decoding.

    Args:
        tree_size: drafted nodes that were verified, root excluded. 0 if `tree_budget="auto"` did not draft.
        accepted_length: drafted tokens kept, root and bonus token excluded.
        tree: the verified tree without its `proposals`, with `tree_trace=True`.
        path: its accepted nodes from the root, 0, down, with `tree_trace=True`.
        seconds: wall time by stage ("draft", "verify", "walk", "commit"), with `tree_timing=True`.

    Example:
        >>> output = model.generate(**inputs, tree_budget=16, return_dict_in_generate=True)
        >>> [entry.accepted_length for entry in output.rounds]
    """

    tree_size: int
    accepted_length: int
    tree: DraftTree | None = None
    path: list[int] | None = None
    seconds: dict[str, float] | None = None


@dataclass
class GenerateDDTreeOutput(GenerateDecoderOnlyOutput):
    """transformers' decoder-only output plus the rounds. Every other field means what it does in plain generate.

    Args:
        rounds: one entry per target forward after the prefill.

    Example:
        >>> output = model.generate(**inputs, tree_budget=16, return_dict_in_generate=True)
        >>> len(output.rounds), output.tokens_per_round
    """

    rounds: list[Round] | None = None

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per round: accepted drafted tokens and the bonus token (tau in the DFlash paper).

        NaN if there were no rounds.
        """
        if not self.rounds:
            return float("nan")
        return 1 + sum(r.accepted_length for r in self.rounds) / len(self.rounds)


class Recorder:
    """Collects what a `generate` call returns beside the tokens, as far as the request asks for it.

    Args:
        request: the request.
        device: the target's device. With `tree_timing=True`, stages begin and end when the device has finished.
    """

    def __init__(self, request: Request, device: torch.device):
        self.request, self.device = request, device
        self.hidden_states: tuple | None = () if request.keep_hidden_states else None
        self.rounds: list[Round] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the time of a stage of the round if the request asks for it.

        Args:
            name: "draft", "verify", "walk" or "commit".
        """
        if not self.request.timing:
            yield
            return
        start = now(self.device)
        yield
        self.seconds[name] = now(self.device) - start

    def add_round(self, tree: DraftTree, path: list[int], outputs: ModelOutput) -> None:
        """Record a finished round.

        Args:
            tree: the verified tree.
            path: its accepted path.
            outputs: the outputs of the target's forward over the tree.
        """
        entry = Round(tree_size=len(tree) - 1, accepted_length=len(path) - 1)
        if self.request.trace:
            # proposals are dropped, because each holds a distribution over the vocabulary
            entry.tree, entry.path = replace(tree, proposals={}), path
        if self.request.timing:
            entry.seconds, self.seconds = self.seconds, {}
        self.rounds.append(entry)
        for node in path:
            self.add_hidden_states(outputs, rows=slice(node, node + 1))

    def add_hidden_states(self, outputs: ModelOutput, rows: slice) -> None:
        """Record the hidden states that chose one token.

        Args:
            outputs: the outputs of a target forward.
            rows: the rows of each layer's `[1, n, H]`, or `[streams, 1, n, H]` in Gemma 3n.
        """
        if self.hidden_states is not None:
            # copies, because a view would keep the states of the whole tree alive
            self.hidden_states += (tuple(own_storage(state[..., rows, :]) for state in outputs.hidden_states),)

    def output(self, emitter: Emitter, cache: Cache) -> GenerateDDTreeOutput | torch.Tensor:
        """Return what `generate` returns.

        Args:
            emitter: the finished sequence.
            cache: the cache after it.
        """
        if not self.request.return_dict:
            return emitter.input_ids
        return GenerateDDTreeOutput(
            sequences=emitter.input_ids,
            scores=emitter.scores,
            logits=emitter.logits,
            hidden_states=self.hidden_states,
            cache=cache,
            rounds=self.rounds,
        )
