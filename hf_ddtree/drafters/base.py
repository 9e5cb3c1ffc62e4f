"""The interface between drafters and the decoding loop."""

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from ..tree import DraftTree
from .q import DraftSampling


class Drafter(CandidateGenerator):
    """Drafts a tree per round. One object serves one `generate` call and holds the drafting state of that call.

    Derive from this class to write a drafter of your own. `draft` is the only method it needs. A drafter only shapes
    the tree. Its tokens cannot change the output under three conditions. The root carries the last token. Drawn
    children were drawn from the q in the tree's `proposals`. The drafter leaves torch's global random generators alone.

    Attributes:
        taps: the target's hidden states that the drafter reads, as indices into `outputs.hidden_states`.
        sampling: how it chooses children. None if it never draws any.
        used: whether it has served its call.

    Example:
        >>> class RepeatLastToken(hf_ddtree.Drafter):
        ...     def draft(self, input_ids, tree_budget, max_depth):
        ...         n_nodes = 1 + min(tree_budget, max_depth)
        ...         return hf_ddtree.DraftTree.chain([int(input_ids[0, -1])] * n_nodes)
        >>> output = model.generate(**inputs, assistant_model=RepeatLastToken(), tree_budget=4)
    """

    taps: tuple[int, ...] = ()
    sampling: DraftSampling | None = None
    used: bool = False

    def prefill(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Take in the target's states of the prompt.

        Args:
            hidden_states: `[1, P, taps * H]`, the tapped states of the prompt tokens that ran, padding excluded.
            position_ids: `[1, P]` int64, their positions.
        """

    def draft(self, input_ids: torch.Tensor, tree_budget: int, max_depth: int) -> DraftTree:
        """Return the tree of the next round.

        Args:
            input_ids: `[1, S]` int64, the sequence without padding. Its last token is the root.
            tree_budget: the number of drafted nodes, root excluded.
            max_depth: the depth of the deepest useful node, at least 1. The generation ends before deeper nodes.

        Returns:
            A tree whose root carries the last token. A fixed budget verifies all of its nodes, even if there are more
            than `tree_budget`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft(input_ids, tree_budget, max_depth).")

    def commit(self, path: list[int], hidden_states: torch.Tensor) -> None:
        """Take in the accepted path of a round.

        Args:
            path: node indices from the root down, of the tree that was drafted last. In a round without a draft, in
                which `draft` is not called, the path is the root alone, [0].
            hidden_states: `[1, len(path), taps * H]`, the target's tapped states at these nodes.
        """

    def update_acceptance(self, overlaps: list[tuple[int, float]]) -> None:
        """Take in how far q and p overlapped where the walk tried drawn children.

        Args:
            overlaps: for each node, the depth of its children and the overlap there, from 0 to 1.
        """
        if self.sampling is not None:
            self.sampling.update_acceptance(overlaps)

    def get_candidates(self, input_ids, **kwargs):
        """Refuse: transformers' own assisted decoding takes sequences, and this object drafts trees.

        Args:
            input_ids: `[B, S]` int64, as transformers passes it.
            kwargs: further arguments of transformers.

        Raises:
            NotImplementedError: always. The message says how to decode with a tree.
        """
        raise NotImplementedError(
            f"{type(self).__name__} drafts trees, and transformers' assisted decoding takes sequences. Call "
            "hf_ddtree.enable(model) and model.generate(..., assistant_model=drafter, tree_budget=64)."
        )


def draft_tree(drafter: Drafter, input_ids: torch.Tensor, n_nodes: int, max_depth: int) -> DraftTree:
    """Return the drafter's tree, or the root alone if no node is wanted.

    Args:
        drafter: the drafter.
        input_ids: `[1, S]` int64, the sequence without padding.
        n_nodes: drafted nodes, root excluded. 0 for no draft.
        max_depth: the depth of the deepest useful node.

    Raises:
        ValueError: if a drafter of the user's own returns something else than such a tree, which could change the
            output.
    """
    root_token_id = int(input_ids[0, -1])
    if n_nodes == 0:
        return DraftTree.chain([root_token_id])
    tree = drafter.draft(input_ids, n_nodes, max_depth)
    if not isinstance(tree, DraftTree) or int(tree.token_ids[0]) != root_token_id:
        raise ValueError(
            f"assistant_model: draft must return a DraftTree whose root is the last token, {root_token_id}."
        )
    if problem := _problem(tree):
        raise ValueError(f"assistant_model: what draft returned is not a tree: {problem}.")
    return tree


def _problem(tree: DraftTree) -> str | None:
    """Return why the mask, the positions or the selection of nodes would go wrong with this tree, or None."""
    parents, depths = tree.parents.numpy(), tree.depths.numpy()
    reach = np.zeros(len(tree)) if tree.log_reach is None else tree.log_reach.double().numpy()
    above = parents[1:]
    if not len(parents) == len(depths) == len(reach) == len(tree):
        return "its arrays have different lengths"
    if parents[0] != -1 or (above < 0).any() or (above >= np.arange(1, len(tree))).any():
        return "the root's parent must be -1, and every other parent must precede its children"
    if depths[0] != 0 or (depths[1:] != depths[above] + 1).any():
        return "depths must be the numbers of edges to the root"
    if reach[0] != 0 or not (reach[1:] <= reach[above]).all():
        return "log_reach must be 0 at the root, and elsewhere at most the parent's value"
    return None
