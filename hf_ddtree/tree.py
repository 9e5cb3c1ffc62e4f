"""The draft tree: its data structure and best-first construction from the drafter's marginals."""

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from .randomness import Randomness


@dataclass(frozen=True)
class Proposal:
    """The drawn children of one node, and what they were drawn from: q outside the deterministic children.

    Args:
        tokens: in draw order.
        q: `[V]`, the drafter's distribution at the node.
        inside: the tokens of the deterministic children.
        depth: of the children.
        replacement: the tokens were drawn with replacement.
    """

    tokens: list[int]
    q: torch.Tensor
    inside: list[int]
    depth: int
    replacement: bool

    def outside(self, p: torch.Tensor) -> torch.Tensor:
        """`[V]`: q restricted to the tokens outside and renormalised, on the device and in the dtype of `p`."""
        outside = self.q.to(p, copy=True)
        outside[self.inside] = 0
        return outside / outside.sum()


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens. Node 0 is the root: the last emitted token, chosen but not yet in the target's cache.

    Nodes are in topological order: a parent precedes its children. All arrays live on the CPU, where the walk reads
    them.

    Args:
        token_ids: `[N]` int64, the token of each node.
        parents: `[N]` int64, the index of each node's parent, -1 for the root.
        depths: `[N]` int64, the number of edges to the root.
        proposals: what the children of a node were drawn from, for the nodes that have drawn children.
        log_reach: `[N]` float32, the estimated log-probability that the walk reaches a node, 0 for the root and at most
            the parent's. None if there is no estimate, or if it depends on tokens that were drawn: then nothing may be
            decided by it.
        origin: of a part of a drafted tree, the index there of each node; None for a whole one.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    proposals: dict[int, Proposal] = field(default_factory=dict)
    log_reach: torch.Tensor | None = None
    origin: list[int] | None = None

    @classmethod
    def from_lists(
        cls,
        token_ids: list[int],
        parents: list[int],
        proposals: dict[int, Proposal] | None = None,
        log_reach: list[float] | None = None,
    ) -> "DraftTree":
        """Build a tree from token ids and parents in topological order, root first.

        Args:
            token_ids, parents, proposals, log_reach: as of the class.
        """
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
        estimates = None if log_reach is None else torch.tensor(log_reach)
        return cls(_tensor(token_ids), _tensor(parents), _tensor(depths), proposals or {}, estimates)

    def __len__(self) -> int:
        """The number of nodes, root included."""
        return len(self.token_ids)

    def child(self, node: int, token_id: int) -> int | None:
        """The first child of a node that carries a token, or None. (Only draws with replacement repeat a token.)

        Args:
            node: its index.
            token_id: the token.
        """
        found = (self.parents.numpy() == node) & (self.token_ids.numpy() == token_id)
        first = int(found.argmax())
        return first if found[first] else None

    def subtree(self, nodes: list[int]) -> "DraftTree":
        """The tree of some nodes, ascending, the parent of each and of their earlier drawn siblings among them.

        Which nodes may depend on `log_reach`, but not on a drawn token. Then the output keeps its distribution: what the
        remaining children were drawn from is unchanged, and there are fewer of them.

        Args:
            nodes: their indices, the root's first.
        """
        index = {node: i for i, node in enumerate(nodes)}
        parents = [-1, *(index[parent] for parent in self.parents[nodes[1:]].tolist())]
        n_kept = Counter(parent for node, parent in zip(nodes, self.parents[nodes].tolist()) if node in self._drawn)
        proposals = {
            index[node]: replace(proposal, tokens=proposal.tokens[: n_kept[node]])
            for node, proposal in self.proposals.items()
            if n_kept[node]
        }
        log_reach = None if self.log_reach is None else self.log_reach[nodes]
        return DraftTree(
            self.token_ids[nodes], _tensor(parents), self.depths[nodes], proposals, log_reach, origin=nodes
        )

    def drafted_nodes(self, path: list[int]) -> list[int]:
        """The nodes of a path as the drafter counted them.

        Args:
            path: indices of nodes of this tree.
        """
        return path if self.origin is None else [self.origin[node] for node in path]

    @cached_property
    def _drawn(self) -> set[int]:
        """The nodes whose token was drawn."""
        return {
            node
            for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.token_ids.tolist()))
            if parent in self.proposals and token not in self.proposals[parent].inside
        }

    @cached_property
    def ancestor_mask(self) -> torch.Tensor:
        """`[N, N]` bool: entry (i, j) is True where node j is an ancestor of node i or i itself."""
        rows = []  # as integers, bit j for node j
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(1 << node | (rows[parent] if node else 0))
        n_bytes = (len(self) + 7) // 8
        packed = np.frombuffer(b"".join(row.to_bytes(n_bytes, "little") for row in rows), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(-1, n_bytes), axis=1, count=len(self), bitorder="little")
        return torch.from_numpy(bits.view(bool))


@dataclass(frozen=True)
class Policy:
    """Which children a node may get.

    Args:
        deterministic: the most probable tokens, best first.
        drawn: at most so many tokens drawn from q outside the deterministic ones.
        replacement: draw with replacement.
    """

    deterministic: bool
    drawn: int
    replacement: bool = False


# Drawn children come from a sharpened q: marginals are flatter than the distributions along any one path. Any proposal is
# exact; 0.8 accepted 7% more of the drawn children than 1.0 at temperature 1, with a DFlash drafter of SmolLM2-135M.
PROPOSAL_TEMPERATURE = 0.8
MOST_DRAWN = 8  # further draws at one node are hardly ever reached
POLICIES = {
    "target": Policy(deterministic=True, drawn=0),
    "hybrid": Policy(deterministic=True, drawn=1),
    "swor": Policy(deterministic=False, drawn=MOST_DRAWN),
    "spectr": Policy(deterministic=False, drawn=MOST_DRAWN, replacement=True),
}


def build_tree(
    draft_logits: torch.Tensor,
    tree_budget: int,
    root_token_id: int = -1,
    policy: Policy = POLICIES["target"],
    acceptance: list[float] | None = None,
    randomness: Randomness | None = None,
) -> DraftTree:
    """Choose the tree's shape best-first from the drafter's marginals, then draw the tokens of its drawn nodes.

    Without drawn nodes these are the `tree_budget` most probable prefixes: (v_1, .., v_d) has probability
    q_1(v_1) * .. * q_d(v_d). See `tree_shape` for the others. The shape is fixed before anything is drawn, from q alone;
    a shape that reacted to drawn tokens would bias the output.

    Args:
        draft_logits: `[depth, V]` float, row d-1 holds the logits of the token at depth d. Any device: the top-k is
            taken there and only its result is copied to the host.
        tree_budget: the number of drafted nodes, root excluded. The tree is smaller where there are fewer prefixes.
        root_token_id: the token of node 0.
        policy: which children there are: one of `hf_ddtree.tree.POLICIES`, by the name of its `tree_sampling`.
        acceptance: `[depth]`, how probable the acceptance of a drawn child is; needed if the policy draws.
        randomness: a `hf_ddtree.randomness.Randomness`, where draws come from; needed if the policy draws.

    Returns:
        A tree with `log_reach`; without it where `depth` is 0 and the root is all.

    Raises:
        ValueError: if the logits contain NaN.

    Source: Ringel & Romano, DDTree (arXiv 2604.12989), Algorithm 1.
    """
    if draft_logits.shape[0] == 0:
        return DraftTree.from_lists([root_token_id], [-1])
    draft_logits = draft_logits.float()
    top_logits, top_ids = draft_logits.topk(min(tree_budget, draft_logits.shape[-1]), dim=-1)
    top_log_probs = (top_logits - draft_logits.logsumexp(dim=-1, keepdim=True)).tolist()
    if any(math.isnan(row[0]) for row in top_log_probs):
        raise ValueError("draft_logits contain NaN: the drafter's weights are broken, or its dtype overflows.")
    q = (draft_logits / PROPOSAL_TEMPERATURE).softmax(dim=-1) if policy.drawn else None
    # what has no probability cannot be drafted; q underflows before its logarithm does
    possible = (top_logits > -math.inf if q is None else q.gather(-1, top_ids) > 0).sum(dim=-1).tolist()
    top_log_probs = [row[:n] for row, n in zip(top_log_probs, possible)]
    if policy.drawn:
        levels, ranks, parents, log_reach = tree_shape(top_log_probs, tree_budget, policy, acceptance)
    else:
        levels, ranks, parents, log_reach = most_probable_prefixes(top_log_probs, tree_budget)
    # a drawn node has rank -1 until its token is drawn
    token_ids = torch.cat([_tensor([root_token_id]), top_ids.cpu()[_tensor(levels), _tensor(ranks)]])
    depths = _tensor([-1, *levels]) + 1
    proposals = {}
    if policy.drawn:
        ids = top_ids.tolist()
        for level, parents_drawn in drawn_by_level(levels, ranks, parents).items():
            requests = [(ids[level][:n_deterministic], len(nodes)) for n_deterministic, nodes in parents_drawn.values()]
            drawn = draw_children(q[level], requests, level + 1, policy, randomness)
            for (parent, (_, nodes)), proposal in zip(parents_drawn.items(), drawn):
                token_ids[nodes] = torch.tensor(proposal.tokens)
                proposals[parent] = proposal
    return DraftTree(token_ids, _tensor([-1, *parents]), depths, proposals, torch.tensor([0.0, *log_reach]))


def _tensor(values: list[int]) -> torch.Tensor:
    """int64, by way of NumPy, which reads lists several times faster."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def draw_children(
    q: torch.Tensor, requests: list[tuple[list[int], int]], depth: int, policy: Policy, randomness: Randomness
) -> list[Proposal]:
    """Draw the tokens of drawn nodes, for several parents that share q.

    Args:
        q: `[V]`.
        requests: per parent, the tokens of its deterministic children, and how many to draw outside them.
        depth: of the children.
    """
    drawn = randomness.draw_outside(q, requests, distinct=not policy.replacement)
    return [Proposal(tokens, q, inside, depth, policy.replacement) for (inside, _), tokens in zip(requests, drawn)]


def drawn_by_level(levels: list[int], ranks: list[int], parents: list[int]) -> dict[int, dict[int, tuple]]:
    """Per level, the parents that have drawn children: how many deterministic ones, and which nodes are drawn."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, 1):
        children.setdefault(parent, []).append(node)
    result: dict[int, dict[int, tuple]] = {}
    for parent, siblings in children.items():
        drawn = [node for node in siblings if ranks[node - 1] < 0]
        if drawn:
            level = levels[siblings[0] - 1]
            result.setdefault(level, {})[parent] = (len(siblings) - len(drawn), drawn)
    return result


def most_probable_prefixes(log_probs: list[list[float]], tree_budget: int) -> tuple[list, list, list, list]:
    """The shape of a tree of deterministic nodes, by Algorithm 1: a node's value does not depend on its siblings.

    A search pops the most probable prefix not yet taken and pushes its next sibling and its first child, neither of
    which is more probable; hence nodes come out in order of probability and a parent before its children.

    Args and result as of `tree_shape`.
    """
    levels, ranks, parents, log_reach = [], [], [], []
    order = 0  # breaks ties in favour of the prefix pushed first
    heap = [(-log_probs[0][0], order, 0, 0, 0, 0.0)]
    while heap and len(parents) < tree_budget:
        neg_log_prob, _, level, rank, parent, parent_log_prob = heap[0]
        levels.append(level)
        ranks.append(rank)
        parents.append(parent)
        log_reach.append(-neg_log_prob)
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
    return levels, ranks, parents, log_reach


def tree_shape(
    log_probs: list[list[float]], tree_budget: int, policy: Policy, acceptance: list[float]
) -> tuple[list, list, list, list]:
    """The shape of a tree with drawn children over marginals: best-first by the estimated probability that the walk reaches a node.

    Args:
        log_probs: per level, the sorted log-probabilities of its most probable tokens, all of them possible.
        tree_budget: the number of nodes to take.
        policy, acceptance: as in `build_tree`.

    Returns:
        Per node, without the root: its level (depth - 1), its rank in the level's marginal or -1 for a drawn node, its
        parent (0 is the root), and the logarithm of the estimate.
    """
    levels, ranks, parents, log_reaches = [], [], [], []
    open_nodes = OpenNodes(policy)
    open_nodes.add(0, 0.0, log_probs[0], acceptance[0])
    while len(parents) < tree_budget and (best := open_nodes.take()):
        parent, rank, log_reach = best
        level = levels[parent - 1] + 1 if parent else 0
        levels.append(level)
        ranks.append(rank)
        parents.append(parent)
        log_reaches.append(log_reach)
        if level + 1 < len(log_probs):
            open_nodes.add(len(parents), log_reach, log_probs[level + 1], acceptance[level + 1])
    return levels, ranks, parents, log_reaches


class OpenNodes:
    """The children that may be added next, in order of the estimated probability that the walk reaches them.

    At a node reached with probability r, the deterministic child of rank k is reached with r q(k); a further drawn child
    with r a (1 - a)^j (1 - q(S)), where S are the deterministic children so far, j the drawn ones, and a is the
    probability that a drawn child is accepted once the walk leaves S.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.heap = []
        self.order = 0  # breaks ties in favour of what was offered first
        self.nodes = {}

    def add(self, node: int, log_reach: float, log_probs: list[float], acceptance: float) -> None:
        """Open a node: `log_probs` are the sorted log-probabilities of its most probable children."""
        self.nodes[node] = _OpenNode(log_reach, log_probs, min(max(acceptance, 0.01), 0.99))
        if self.policy.deterministic:
            self._offer_deterministic(node, self.nodes[node])
        if self.policy.drawn:
            self._offer_drawn(node, self.nodes[node])

    def take(self) -> tuple[int, int, float] | None:
        """The best child: its parent, its rank or -1 if it is to be drawn, and its log-probability of being reached."""
        while self.heap:
            negative, _, node, rank, n_deterministic = heapq.heappop(self.heap)
            state = self.nodes[node]
            if rank >= 0:
                state.n_deterministic += 1
                state.mass += math.exp(state.log_probs[rank])
                self._offer_deterministic(node, state)
                return node, rank, -negative
            if n_deterministic == state.n_deterministic:
                state.n_drawn += 1
                self._offer_drawn(node, state)
                return node, -1, -negative
            self._offer_drawn(node, state)  # S has grown since: worth less now
        return None

    def _offer_deterministic(self, node: int, state: "_OpenNode") -> None:
        rank = state.n_deterministic
        if rank + state.n_drawn < len(state.log_probs):
            self._push(state.log_reach + state.log_probs[rank], node, rank, rank)

    def _offer_drawn(self, node: int, state: "_OpenNode") -> None:
        outside = 1 - state.mass
        n_children = state.n_deterministic + state.n_drawn
        if state.n_drawn == self.policy.drawn or n_children >= len(state.log_probs) or outside < 1e-6:
            return
        value = state.log_reach + math.log(outside * state.acceptance) + state.n_drawn * math.log1p(-state.acceptance)
        self._push(value, node, -1, state.n_deterministic)

    def _push(self, value: float, node: int, rank: int, n_deterministic: int) -> None:
        self.order += 1
        heapq.heappush(self.heap, (-value, self.order, node, rank, n_deterministic))


class _OpenNode:
    """A node whose children are being chosen."""

    def __init__(self, log_reach: float, log_probs: list[float], acceptance: float):
        self.log_reach, self.log_probs, self.acceptance = log_reach, log_probs, acceptance
        self.n_deterministic, self.n_drawn, self.mass = 0, 0, 0.0
