"""The interface between drafters and the decoding loop."""

from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from ..tree import DraftTree
from .q import DraftSampling


class NeedsTreeError(ValueError, AttributeError):
    """Raised where plain assisted decoding asks a drafter for something that only a model that generates has.

    It is an AttributeError as well, because the attribute is missing: `hasattr` answers False.

    Args:
        drafter: the drafter.
        name: the missing attribute.
    """

    def __init__(self, drafter: object, name: str):
        super().__init__(
            f"assistant_model: a {type(drafter).__name__} drafts trees and has no {name}, which plain assisted "
            "decoding reads. Call hf_ddtree.enable(model), and pass tree_budget to generate, too."
        )


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
            max_depth: how deep a node may lie, at least 1. The generation ends before deeper nodes, or the target has
                no position for them.

        Returns:
            A tree of at most `max_depth` levels whose root carries the last token. A fixed budget verifies all of its
            nodes, even if there are more than `tree_budget`.
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

    @cached_property
    def config(self) -> NoReturn:
        # Plain assisted decoding reads it first. A drafter may set one of its own, which a cached property allows.
        raise NeedsTreeError(self, "config")


def draft_tree(drafter: Drafter, input_ids: torch.Tensor, n_nodes: int, max_depth: int, vocab_size: int) -> DraftTree:
    """Return the drafter's tree, or the root alone if no node is wanted.

    Args:
        drafter: the drafter.
        input_ids: `[1, S]` int64, the sequence without padding.
        n_nodes: drafted nodes, root excluded. 0 for no draft.
        max_depth: how deep a node may lie.
        vocab_size: the number of the target's token ids.

    Raises:
        ValueError: if a drafter of the user's own returns something else than such a tree. It could change the output,
            or fail in the target's forward.
    """
    root_token_id = int(input_ids[0, -1])
    if n_nodes == 0:
        return DraftTree.chain([root_token_id])
    tree = drafter.draft(input_ids, n_nodes, max_depth)
    problem = _problem(tree) or _misfit(tree, root_token_id, max_depth, vocab_size)
    if problem is not None:
        raise ValueError(
            f"assistant_model: {type(drafter).__name__}.draft returned no tree that can be verified: {problem}; "
            "hf_ddtree.Drafter.draft describes such a tree."
        )
    return tree


def _problem(tree: object) -> str | None:
    """Return why what was drafted is not a tree, or None."""
    if not isinstance(tree, DraftTree):
        return f"a {type(tree).__name__} is not a DraftTree"
    for name in ("token_ids", "parents", "depths"):
        if not _is_array(getattr(tree, name), torch.int64):
            return f"{name} is not a 1-dimensional int64 tensor on the CPU"
    if tree.log_reach is not None and not _is_array(tree.log_reach, torch.float32, torch.float64):
        return "log_reach is not a 1-dimensional float32 tensor on the CPU"
    parents, depths = tree.parents.numpy(), tree.depths.numpy()
    reach = np.zeros(len(tree)) if tree.log_reach is None else tree.log_reach.double().numpy()
    above = parents[1:]
    if not len(parents) == len(depths) == len(reach) == len(tree):
        return "its arrays have different lengths"
    if len(tree) == 0:
        return "it is empty, and every tree has a root"
    if parents[0] != -1 or (above < 0).any() or (above >= np.arange(1, len(tree))).any():
        return "the root's parent must be -1, and every other parent must precede its children"
    if depths[0] != 0 or (depths[1:] != depths[above] + 1).any():
        return "depths must be the numbers of edges to the root"
    if reach[0] != 0 or not (reach[1:] <= reach[above]).all():
        return "log_reach must be 0 at the root, and elsewhere at most the parent's value"
    return None


def _is_array(value: object, *dtypes: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_cpu and value.dtype in dtypes


def _misfit(tree: DraftTree, root_token_id: int, max_depth: int, vocab_size: int) -> str | None:
    """Return why a tree does not fit the sequence and the target, or None."""
    token_ids = tree.token_ids.numpy()
    if token_ids[0] != root_token_id:
        return f"its root is {token_ids[0]}, and the root is the last token, {root_token_id}"
    drafted = token_ids[1:]
    outside = drafted[(drafted < 0) | (drafted >= vocab_size)]
    if len(outside):
        return f"token {outside[0]} is outside the target's vocabulary of {vocab_size} tokens"
    deepest = int(tree.depths.max())
    if deepest > max_depth:
        return f"a node lies at depth {deepest}, and draft got max_depth={max_depth}"
    for node, proposal in tree.proposals.items():
        tokens = [*proposal.tokens, *proposal.inside]
        if not 0 <= node < len(tree) or not all(0 <= token < len(proposal.q) for token in tokens):
            return f"the proposal of node {node} names a node that is not in the tree, or a token outside its q"
    return None
