"""Building the tree best-first from the drafter's marginals, and drawing the tokens of its drawn nodes."""

import heapq
import math
from dataclasses import replace

import torch

from .sampling.policies import POLICIES, PROPOSAL_TEMPERATURE, Policy
from .sampling.randomness import Randomness
from .tree import DraftTree, Proposal, float32, int64

MIN_ACCEPTANCE, MAX_ACCEPTANCE = 0.01, 0.99  # bounds of the estimate for a drawn child, whose logarithm is taken
MIN_OUTSIDE = 1e-6  # probability outside the deterministic children below which no child is drawn there

# per node without the root: level (depth - 1), rank in the level's marginal or -1 for a drawn node, parent, log_reach
Shape = tuple[list[int], list[int], list[int], list[float]]


def build_tree(
    draft_logits: torch.Tensor,
    tree_budget: int,
    root_token_id: int = -1,
    policy: Policy = POLICIES["target"],
    acceptance: list[float] | None = None,
    randomness: Randomness | None = None,
) -> DraftTree:
    """Choose the tree's shape best-first from the drafter's marginals, then draw the tokens of its drawn nodes.

    Without drawn nodes, the tree holds the `tree_budget` most probable prefixes, where the prefix (v_1, .., v_d) has
    probability q_1(v_1) * .. * q_d(v_d). The shape is fixed from q alone before anything is drawn, because a shape that
    reacted to drawn tokens would bias the output.

    Args:
        draft_logits: `[depth, V]` float on any device. Row d - 1 holds the logits of the token at depth d. The top-k is
            taken on the device, and only its result is copied to the host.
        tree_budget: the number of drafted nodes, root excluded. The tree is smaller if there are fewer prefixes.
        root_token_id: the token of node 0.
        policy: which children a node gets: a value of `hf_ddtree.POLICIES`.
        acceptance: `[depth]`, the estimated probability that a drawn child is accepted. Needed if the policy draws.
        randomness: the source of draws. Needed if the policy draws.

    Returns:
        A tree with `log_reach`. If `depth` is 0, the root alone without `log_reach`.

    Raises:
        ValueError: if the logits of a level are no distribution, because they contain NaN or infinity or because no
            token is possible. Also if the policy draws and `acceptance` or `randomness` is missing.

    Example:
        >>> draft_logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
        >>> hf_ddtree.build_tree(draft_logits, tree_budget=3, root_token_id=7).token_ids
        tensor([7, 0, 1, 1])

    Source: Ringel & Romano, DDTree (arXiv 2604.12989), Algorithm 1.
    """
    if policy.drawn and (acceptance is None or randomness is None):
        raise ValueError("policy: it draws children, so build_tree needs acceptance and randomness too; pass both.")
    if draft_logits.shape[0] == 0:
        return DraftTree.chain([root_token_id])
    draft_logits = draft_logits.float()
    top_logits, top_ids = draft_logits.topk(min(tree_budget, draft_logits.shape[-1]), dim=-1)
    top_log_probs = (top_logits - draft_logits.logsumexp(dim=-1, keepdim=True)).tolist()
    if any(math.isnan(row[0]) for row in top_log_probs):
        # inf - inf is NaN as well, so this row may hold infinity, or minus infinity everywhere
        raise ValueError(
            "draft_logits: a row contains NaN or infinity, or nothing but minus infinity; the drafter's weights are "
            "broken, or its dtype overflows."
        )
    if acceptance is None or randomness is None or not policy.drawn:
        # a token without probability cannot be drafted
        shape = most_probable_prefixes(_first(top_log_probs, top_logits > -math.inf), tree_budget)
        return _tree(root_token_id, top_ids, shape)
    q = (draft_logits / PROPOSAL_TEMPERATURE).softmax(dim=-1)
    # q underflows before its logarithm does
    possible = _first(top_log_probs, q.gather(-1, top_ids) > 0)
    shape = shape_with_draws(possible, tree_budget, policy, acceptance)
    tree = _tree(root_token_id, top_ids, shape)
    proposals = _draw_tokens(tree.token_ids, q, top_ids.tolist(), shape, policy, randomness)
    return replace(tree, proposals=proposals)


def _first(rows: list[list[float]], wanted: torch.Tensor) -> list[list[float]]:
    """Return the first entries of each row: as many as `wanted`, `[rows, n]` bool, has True entries in that row."""
    return [row[:n] for row, n in zip(rows, wanted.sum(dim=-1).tolist(), strict=True)]


def _tree(root_token_id: int, top_ids: torch.Tensor, shape: Shape) -> DraftTree:
    """Return the tree of a shape. Drawn nodes, of rank -1, do not have their token yet."""
    levels, ranks, parents, log_reach = shape
    token_ids = torch.cat([int64([root_token_id]), top_ids.cpu()[int64(levels), int64(ranks)]])
    depths = int64([-1, *levels]) + 1
    return DraftTree(token_ids, int64([-1, *parents]), depths, log_reach=float32([0.0, *log_reach]))


def draw_children(
    q: torch.Tensor, requests: list[tuple[list[int], int]], depth: int, policy: Policy, randomness: Randomness
) -> list[Proposal]:
    """Draw children for several parents that share q, and return one proposal per parent.

    Args:
        q: `[V]`, the drafter's distribution at the parents.
        requests: per parent, the tokens of its deterministic children, and how many tokens to draw outside them.
        depth: the depth of the children.
        policy: says whether to draw with replacement.
        randomness: the source of draws.
    """
    drawn = randomness.draw_outside(q, requests, distinct=not policy.replacement)
    return [
        Proposal(tokens, q, inside, depth, policy.replacement)
        for (inside, _), tokens in zip(requests, drawn, strict=True)
    ]


def _draw_tokens(
    token_ids: torch.Tensor,
    q: torch.Tensor,
    top_ids: list[list[int]],
    shape: Shape,
    policy: Policy,
    randomness: Randomness,
) -> dict[int, Proposal]:
    """Write the tokens of the drawn nodes into `token_ids`, and return the proposals by parent."""
    levels, ranks, parents, _ = shape
    proposals = {}
    for level, by_parent in _drawn_by_level(levels, ranks, parents).items():
        requests = [(top_ids[level][:n_deterministic], len(nodes)) for n_deterministic, nodes in by_parent.values()]
        drawn = draw_children(q[level], requests, level + 1, policy, randomness)
        for (parent, (_, nodes)), proposal in zip(by_parent.items(), drawn, strict=True):
            token_ids[nodes] = int64(proposal.tokens)
            proposals[parent] = proposal
    return proposals


def _drawn_by_level(
    levels: list[int], ranks: list[int], parents: list[int]
) -> dict[int, dict[int, tuple[int, list[int]]]]:
    """Return, per level and parent with drawn children: its number of deterministic children, and its drawn nodes."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, 1):
        children.setdefault(parent, []).append(node)
    result: dict[int, dict[int, tuple[int, list[int]]]] = {}
    for parent, siblings in children.items():
        drawn = [node for node in siblings if ranks[node - 1] < 0]
        if drawn:
            level = levels[siblings[0] - 1]
            result.setdefault(level, {})[parent] = (len(siblings) - len(drawn), drawn)
    return result


def most_probable_prefixes(log_probs: list[list[float]], tree_budget: int) -> Shape:
    """Return the shape of the `tree_budget` most probable prefixes, by Algorithm 1.

    The search pops the most probable prefix that was not taken yet. It then pushes the prefix's next sibling and its
    first child, neither of which is more probable. Nodes therefore come out in order of probability, and a parent comes
    out before its children.

    Args:
        log_probs: per level, the sorted log-probabilities of its most probable tokens, all of them possible.
        tree_budget: the number of nodes to take.
    """
    levels: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    log_reach: list[float] = []
    order = 0  # breaks ties in favour of the prefix that was pushed first
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


def shape_with_draws(log_probs: list[list[float]], tree_budget: int, policy: Policy, acceptance: list[float]) -> Shape:
    """Return the shape of a tree with drawn children, best-first by the estimated probability of reaching a node.

    Args:
        log_probs: per level, the sorted log-probabilities of its most probable tokens, all of them possible.
        tree_budget: the number of nodes to take.
        policy: which children a node gets.
        acceptance: `[depth]`, the estimated probability that a drawn child is accepted.
    """
    levels: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    log_reaches: list[float] = []
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

    Let r be the probability of reaching a node, S its deterministic children so far, and j the number of its drawn
    children. The deterministic child of rank k is reached with r q(k). A further drawn child is reached with
    r a (1 - a)^j (1 - q(S)), where a is the probability that a drawn child is accepted once the walk leaves S.

    Args:
        policy: which children a node gets.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.order = 0  # breaks ties in favour of the child that was offered first
        self.nodes: dict[int, _OpenNode] = {}

    def add(self, node: int, log_reach: float, log_probs: list[float], acceptance: float) -> None:
        """Open a node for children.

        Args:
            node: its index.
            log_reach: the log-probability of reaching it.
            log_probs: the sorted log-probabilities of its most probable children.
            acceptance: the estimated probability that a drawn child is accepted.
        """
        self.nodes[node] = _OpenNode(log_reach, log_probs, min(max(acceptance, MIN_ACCEPTANCE), MAX_ACCEPTANCE))
        if self.policy.deterministic:
            self._offer_deterministic(node, self.nodes[node])
        if self.policy.drawn:
            self._offer_drawn(node, self.nodes[node])

    def take(self) -> tuple[int, int, float] | None:
        """Return the best child: its parent, its rank (-1 for a draw), and its log-probability of being reached."""
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
            self._offer_drawn(node, state)  # S has grown since the offer, so a draw is worth less now
        return None

    def _offer_deterministic(self, node: int, state: "_OpenNode") -> None:
        rank = state.n_deterministic
        if rank + state.n_drawn < len(state.log_probs):
            self._push(state.log_reach + state.log_probs[rank], node, rank, rank)

    def _offer_drawn(self, node: int, state: "_OpenNode") -> None:
        outside = 1 - state.mass
        n_children = state.n_deterministic + state.n_drawn
        if state.n_drawn == self.policy.drawn or n_children >= len(state.log_probs) or outside < MIN_OUTSIDE:
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
