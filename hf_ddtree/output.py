"""What tree decoding returns beside the tokens."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import Cache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig
from transformers.utils import ModelOutput

from .config import TreeConfig
from .tree import DraftTree
from .walk import Emitter


@dataclass
class Round:
    """One round of tree decoding.

    Args:
        tree_size: drafted nodes that were verified, root excluded; 0 where `tree_budget="auto"` did not draft.
        accepted_length: drafted tokens kept, root and bonus token excluded.
        tree: the verified tree without its `proposals`, with `tree_trace=True`.
        path: its accepted nodes, as indices from the root, 0, down, with `tree_trace=True`.
        seconds: wall time by stage ("draft", "verify", "walk", "commit"), with `tree_timing=True`.
    """

    tree_size: int
    accepted_length: int
    tree: DraftTree | None = None
    path: list[int] | None = None
    seconds: dict[str, float] | None = None


@dataclass
class GenerateDDTreeOutput(GenerateDecoderOnlyOutput):
    """transformers' decoder-only output plus the rounds; all else in it means what it does in plain generate.

    Args:
        rounds: one entry per target forward after the prefill.
    """

    rounds: list[Round] | None = None

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per round: accepted drafted tokens and the bonus token (tau in the DFlash paper).

        NaN where the prefill was all.
        """
        if not self.rounds:
            return float("nan")
        return 1 + sum(r.accepted_length for r in self.rounds) / len(self.rounds)


class Recorder:
    """Collects what a `generate` call returns beside the tokens; keeps nothing that was not asked for.

    Args:
        options: the tree options.
        generation_config: says which outputs are wanted.
        device: the target's, waited for at stage boundaries with `tree_timing=True`.
    """

    def __init__(self, options: TreeConfig, generation_config: GenerationConfig, device: torch.device):
        self.options = options
        self.as_dict = generation_config.return_dict_in_generate
        self.hidden_states = () if self.as_dict and generation_config.output_hidden_states else None
        self.device = device
        self.rounds = []
        self.seconds = {}

    @contextmanager
    def stage(self, name: str):
        """Time a stage of the round, if asked to."""
        if not self.options.tree_timing:
            yield
            return
        start = self._now()
        yield
        self.seconds[name] = self._now() - start

    def add_round(self, tree: DraftTree, path: list[int], outputs: ModelOutput) -> None:
        """Record a finished round."""
        entry = Round(tree_size=len(tree) - 1, accepted_length=len(path) - 1)
        if self.options.tree_trace:
            # without what children were drawn from, which takes a vocabulary per level
            entry.tree, entry.path = replace(tree, proposals={}), path
        if self.options.tree_timing:
            entry.seconds, self.seconds = self.seconds, {}
        self.rounds.append(entry)
        for node in path:
            self.add_hidden_states(outputs, rows=slice(node, node + 1))

    def add_hidden_states(self, outputs: ModelOutput, rows: slice) -> None:
        """Record the hidden states that chose one token: `rows` of each layer's `[1, n, H]`."""
        if self.hidden_states is not None:
            self.hidden_states += (tuple(state[:, rows] for state in outputs.hidden_states),)

    def output(self, emitter: Emitter, cache: Cache) -> GenerateDDTreeOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.as_dict:
            return emitter.input_ids
        return GenerateDDTreeOutput(
            sequences=emitter.input_ids,
            scores=emitter.scores,
            logits=emitter.logits,
            hidden_states=self.hidden_states,
            cache=cache,
            rounds=self.rounds,
        )

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
