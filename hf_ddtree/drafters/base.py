"""What a drafter is to the decoding loop."""

import torch
from transformers.generation import CandidateGenerator, GenerationConfig

from ..tree import DraftTree


class TreeCandidateGenerator(CandidateGenerator):
    """Proposes a tree per round. One object serves one `generate` call and holds that call's drafting state.

    A drafter only shapes the tree: nothing it does can change the output, as long as it leaves the global random
    generators alone.

    Attributes:
        tapped_states: the target's hidden states it reads, as indices into `outputs.hidden_states`.
    """

    tapped_states: tuple[int, ...] = ()

    def prefill(self, hidden_states: torch.Tensor | None, position_ids: torch.Tensor) -> None:
        """Take in what the target's prefill computed.

        Args:
            hidden_states: `[1, P, taps * H]`, the tapped states of the prompt tokens that ran, padding excluded.
            position_ids: `[1, P]` int64, their positions.
        """

    def get_candidates(self, input_ids: torch.Tensor, tree_budget: int, max_depth: int) -> DraftTree:
        """Draft the tree of the next round.

        Args:
            input_ids: `[1, S]` int64, the sequence without padding; its last token is the root.
            tree_budget: drafted nodes, root excluded.
            max_depth: deepest useful node, at least 1: beyond it the generation has ended.
        """
        raise NotImplementedError

    def commit_path(self, path: list[int], hidden_states: torch.Tensor | None) -> None:
        """Take in the accepted path of the tree drafted last.

        Args:
            path: node indices from the root down.
            hidden_states: `[1, len(path), taps * H]`, the target's tapped states at these nodes.
        """


def draft_tree(drafter: TreeCandidateGenerator, input_ids: torch.Tensor, tree_budget: int, max_depth: int) -> DraftTree:
    """The drafter's tree, or the root alone where only one more token may follow."""
    if max_depth < 1:
        return DraftTree.from_lists([int(input_ids[0, -1])], [-1])
    return drafter.get_candidates(input_ids, tree_budget, max_depth)


def draft_temperature(generation_config: GenerationConfig) -> float:
    """The temperature at which q is taken: the request's, so that the tree covers what will be sampled."""
    if generation_config.do_sample and generation_config.temperature:
        return generation_config.temperature
    return 1.0
