"""The draft tree: its nodes, and what drawn children were drawn from."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Proposal:
    """The drawn children of one node, and the distribution they were drawn from: q outside the deterministic children.

    Args:
        tokens: the drawn tokens, in draw order.
        q: `[V]`, the drafter's distribution at the node.
        inside: the tokens of the deterministic children.
        depth: the depth of the children.
        replacement: whether the tokens were drawn with replacement.
    """

    tokens: list[int]
    q: torch.Tensor
    inside: list[int]
    depth: int
    replacement: bool

    def outside(self, p: torch.Tensor) -> torch.Tensor:
        """Return q without the deterministic tokens and renormalised, `[V]`, on the device and in the dtype of `p`."""
        outside = self.q.to(p, copy=True)
        outside[self.inside] = 0
        return outside / outside.sum()


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens. Node 0 is the root: the last emitted token, which is not in the target's cache yet.

    A parent precedes its children. All arrays live on the CPU, where the walk reads them.

    Args:
        token_ids: `[N]` int64, the token of each node.
        parents: `[N]` int64, the index of each node's parent, -1 for the root.
        depths: `[N]` int64, the number of edges to the root.
        proposals: for each node with drawn children, what they were drawn from.
        log_reach: `[N]` float32, the estimated log-probability that the walk reaches each node: 0 for the root, and at
            most the parent's value for every other node. None if there is no estimate, or if the estimate depends on
            drawn tokens. Without it the automatic budget verifies the whole tree.

    Example:
        >>> tree = hf_ddtree.DraftTree.from_lists(token_ids=[5, 8, 9, 3], parents=[-1, 0, 0, 1])
        >>> tree.child(0, 9)
        2
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    proposals: dict[int, Proposal] = field(default_factory=dict)
    log_reach: torch.Tensor | None = None

    @classmethod
    def from_lists(
        cls,
        token_ids: list[int],
        parents: list[int],
        proposals: dict[int, Proposal] | None = None,
        log_reach: list[float] | None = None,
    ) -> "DraftTree":
        """Build a tree from lists, and compute the depths.

        Args:
            token_ids: the token of each node, the root's first.
            parents: the index of each node's parent, -1 for the root. A parent precedes its children.
            proposals: for each node with drawn children, what they were drawn from.
            log_reach: the estimated log-probability that the walk reaches each node.
        """
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        estimates = None if log_reach is None else float32(log_reach)
        return cls(int64(token_ids), int64(parents), int64(depths), proposals or {}, estimates)

    @classmethod
    def chain(cls, token_ids: list[int]) -> "DraftTree":
        """Build a tree in which every node has one child.

        Args:
            token_ids: the token of each node, the root's first. The root alone is a tree, too.
        """
        return cls.from_lists(token_ids, list(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self.token_ids)

    def child(self, node: int, token_id: int) -> int | None:
        """Return the first child of a node that carries a token, or None. Only draws with replacement repeat a token.

        Args:
            node: the index of the parent.
            token_id: the token of the child.
        """
        found = (self.parents.numpy() == node) & (self.token_ids.numpy() == token_id)
        first = int(found.argmax())
        return first if found[first] else None

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root down to a node, both included.

        Args:
            node: the index of the last node.
        """
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def subtree(self, nodes: list[int]) -> "DraftTree":
        """Return the tree of some nodes.

        The choice of nodes may depend on `log_reach`, but not on a drawn token. The output then keeps its distribution:
        the remaining children still come from the same distribution, and there are fewer of them.

        Args:
            nodes: ascending indices, the root's first. The parent of each node must be among them, and so must the
                siblings that were drawn before a drawn node.
        """
        index = {node: i for i, node in enumerate(nodes)}
        parents = [-1, *(index[parent] for parent in self.parents[nodes[1:]].tolist())]
        drawn = self._drawn_nodes
        n_kept = Counter(
            parent for node, parent in zip(nodes, self.parents[nodes].tolist(), strict=True) if node in drawn
        )
        proposals = {
            index[node]: replace(proposal, tokens=proposal.tokens[: n_kept[node]])
            for node, proposal in self.proposals.items()
            if n_kept[node]
        }
        log_reach = None if self.log_reach is None else self.log_reach[nodes]
        return DraftTree(self.token_ids[nodes], int64(parents), self.depths[nodes], proposals, log_reach)

    @cached_property
    def _drawn_nodes(self) -> set[int]:
        """The nodes whose token was drawn."""
        return {
            node
            for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True))
            if parent in self.proposals and token not in self.proposals[parent].inside
        }

    @cached_property
    def ancestor_mask(self) -> torch.Tensor:
        """`[N, N]` bool: entry (i, j) is True if node j is node i or an ancestor of node i."""
        rows: list[int] = []  # each row as an integer, bit j for node j
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(1 << node | (rows[parent] if node else 0))
        n_bytes = (len(self) + 7) // 8
        packed = np.frombuffer(b"".join(row.to_bytes(n_bytes, "little") for row in rows), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(-1, n_bytes), axis=1, count=len(self), bitorder="little")
        return torch.from_numpy(bits.view(bool))


def float32(values: list[float]) -> torch.Tensor:
    """Return a list as a float32 tensor on the CPU."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def int64(values: list[int]) -> torch.Tensor:
    """Return a list as an int64 tensor on the CPU. NumPy reads lists several times faster than torch does."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
