"""The draft tree: its data structure and best-first construction from the drafter's marginals."""

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens. Node 0 is the root: the last emitted token, chosen but not yet in the target's cache.

    Nodes are in topological order (a parent precedes its children); siblings carry different tokens.
    All arrays live on the CPU, where the walk reads them.

    Args:
        token_ids: `[N]` int64, the token of each node.
        parents: `[N]` int64, the index of each node's parent, -1 for the root.
        depths: `[N]` int64, the number of edges to the root.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor

    @classmethod
    def from_lists(cls, token_ids: list[int], parents: list[int]) -> "DraftTree":
        """Build a tree from token ids and parents in topological order, root first."""
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        return cls(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(depths))

    def __len__(self) -> int:
        """The number of nodes, root included."""
        return len(self.token_ids)

    @cached_property
    def _child_of(self) -> dict[tuple[int, int], int]:
        edges = zip(self.parents.tolist(), self.token_ids.tolist())
        return {edge: node for node, edge in enumerate(edges)}

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`, or None."""
        return self._child_of.get((node, token_id))

    @cached_property
    def ancestor_mask(self) -> torch.Tensor:
        """`[N, N]` bool: entry (i, j) is True where node j is an ancestor of node i or i itself."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for depth in range(1, int(self.depths.max()) + 1):
            level = (self.depths == depth).nonzero()[:, 0]
            mask[level] |= mask[self.parents[level]]
        return mask


def build_tree(draft_logits: torch.Tensor, tree_budget: int, root_token_id: int = -1) -> DraftTree:
    """Take the `tree_budget` most probable prefixes under the product of the drafter's marginals.

    A prefix (v_1, .., v_d) has probability q_1(v_1) * .. * q_d(v_d). A best-first search pops the most probable
    prefix not yet taken and pushes its next sibling and its first child, neither of which is more probable; hence
    nodes come out in order of probability and a parent before its children. Tokens of probability zero are not drafted.

    Args:
        draft_logits: `[depth, V]` float, row d-1 holds the logits of the token at depth d. Any device: the top-k is
            taken there and only its result is copied to the host.
        tree_budget: the number of drafted nodes, root excluded. The tree is smaller where there are fewer prefixes.
        root_token_id: the token of node 0.

    Raises:
        ValueError: if the logits contain NaN.

    Source: Ringel & Romano, DDTree (arXiv 2604.12989), Algorithm 1.
    """
    if draft_logits.shape[0] == 0:
        return DraftTree.from_lists([root_token_id], [-1])
    top_logits, top_ids = draft_logits.float().topk(min(tree_budget, draft_logits.shape[-1]), dim=-1)
    top_log_probs = top_logits - draft_logits.float().logsumexp(dim=-1, keepdim=True)
    levels, ranks, parents = _best_first(top_log_probs.tolist(), tree_budget)
    drafted = top_ids.cpu()[levels, ranks]
    return DraftTree(
        token_ids=torch.cat([torch.tensor([root_token_id]), drafted]),
        parents=torch.tensor([-1, *parents]),
        depths=torch.tensor([0, *(level + 1 for level in levels)]),
    )


def _best_first(log_probs: list[list[float]], tree_budget: int) -> tuple[list[int], list[int], list[int]]:
    """The level, rank within the level's marginal, and parent node of the best nodes; node 0 is the root.

    Args:
        log_probs: per level, the sorted log-probabilities of its most probable tokens.
        tree_budget: the number of nodes to take.
    """
    if any(math.isnan(row[0]) for row in log_probs):
        raise ValueError("draft_logits contain NaN: the drafter's weights are broken, or its dtype overflows.")
    levels, ranks, parents = [], [], []
    order = 0  # breaks ties in favour of the prefix pushed first
    heap = [(-log_probs[0][0], order, 0, 0, 0, 0.0)]
    while heap and len(parents) < tree_budget:
        neg_log_prob, _, level, rank, parent, parent_log_prob = heap[0]
        if neg_log_prob == math.inf:
            break
        levels.append(level)
        ranks.append(rank)
        parents.append(parent)
        row = log_probs[level]
        if rank + 1 < len(row):
            order += 1
            sibling = (-parent_log_prob - row[rank + 1], order, level, rank + 1, parent, parent_log_prob)
            heapq.heapreplace(heap, sibling)
        else:
            heapq.heappop(heap)
        if level + 1 < len(log_probs):
            order += 1
            first_child = neg_log_prob - log_probs[level + 1][0]
            heapq.heappush(heap, (first_child, order, level + 1, 0, len(parents), -neg_log_prob))
    return levels, ranks, parents
