"""Growing a tree level by level from distributions that depend on the path."""

import math

import torch

from ..build import OpenNodes, draw_children
from ..tree import DraftTree, Proposal
from .q import DraftSampling


class Growth:
    """The candidate nodes of a tree that grows level by level, and which of them are among the best so far.

    Args:
        root_token_id: the token of the root.
        tree_budget: drafted nodes, root excluded.
        sampling: how to choose children.
    """

    def __init__(self, root_token_id: int, tree_budget: int, sampling: DraftSampling):
        self.budget = tree_budget
        self.sampling = sampling
        self.proposals: dict[int, Proposal] = {}
        self.token_ids, self.parents, self.depths = [root_token_id], [-1], [0]
        self.log_probs = [0.0]  # of the path to each node
        self.kept: list[int] = []
        self.newest: list[int] = []
        self.evaluated: list[int] = []  # nodes with a row in the drafter's cache, in order
        # [evaluated, evaluated], the ancestor relation
        self.visible = torch.zeros(0, 0, dtype=torch.bool, device="cpu")

    def expand(self, nodes: list[int], log_probs: torch.Tensor) -> None:
        """Add the best children of some nodes, and keep the best `tree_budget` nodes of all.

        Args:
            nodes: the parents.
            log_probs: `[n, V]`, the log-probabilities of their children.
        """
        vocab_size = log_probs.shape[1]
        scores = (log_probs + log_probs.new_tensor([self.log_probs[node] for node in nodes])[:, None]).flatten()
        best, index = scores.topk(min(self.budget, len(scores)))
        new = []
        for score, flat in zip(best.tolist(), index.tolist(), strict=True):
            if score == float("-inf"):
                break
            new.append(self._append(flat % vocab_size, nodes[flat // vocab_size], score))
        self.newest = new
        # A parent is at least as probable as its children and precedes them, so in a stable sort no node loses its
        # parent.
        self.kept = sorted(self.kept + new, key=lambda node: -self.log_probs[node])[: self.budget]

    def _append(self, token_id: int, parent: int, log_prob: float) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.log_probs.append(log_prob)
        return len(self.token_ids) - 1

    def frontier(self) -> list[int]:
        """Return the nodes of the newest level that are still kept."""
        kept = set(self.kept)
        return [node for node in self.newest if node in kept]

    def probability(self, nodes: list[int]) -> float:
        """Return the drafter's probability that the walk reaches one of some nodes.

        Args:
            nodes: their indices.
        """
        return sum(math.exp(self.log_probs[node]) for node in nodes)

    def evaluate(self, frontier: list[int]) -> torch.Tensor:
        """Append nodes to the evaluated ones, and return their rows of the ancestor relation, `[n, evaluated]` bool.

        Args:
            frontier: the nodes to append.
        """
        row_of = {node: row for row, node in enumerate(self.evaluated)}
        n, rows = len(frontier), len(self.evaluated)
        # A child sees what its parent sees, and itself. -1 stands for children of the root, which see no other node.
        parent_rows = [row_of.get(self.parents[node], -1) for node in frontier]
        inherited = torch.cat([self.visible, self.visible.new_zeros(1, rows)])[parent_rows]
        visible = torch.cat([inherited, torch.eye(n, dtype=torch.bool, device="cpu")], dim=1)
        self.visible = torch.cat([torch.nn.functional.pad(self.visible, (0, n)), visible])
        self.evaluated += frontier
        return visible

    def finish(self) -> tuple[DraftTree, dict[int, int]]:
        """Return the tree of the kept nodes, and the cache row of each tree node that was evaluated."""
        order = [0, *self.kept]
        index = {node: i for i, node in enumerate(order)}
        parents = [-1, *(index[self.parents[node]] for node in order[1:])]
        proposals = {index[node]: proposal for node, proposal in self.proposals.items()}
        # with drawn nodes the estimates depend on drawn tokens, so the budget must not select nodes by them
        log_reach = [self.log_probs[node] for node in order] if not proposals else None
        tree = DraftTree.from_lists([self.token_ids[node] for node in order], parents, proposals, log_reach)
        rows = {index[node]: row for row, node in enumerate(self.evaluated) if node in index}
        return tree, rows


class DrawnGrowth(Growth):
    """Growth with drawn children. `log_probs` are estimates of the probability that the walk reaches a node.

    At each level, the number of children of every node is fixed before any of them is drawn. No node is dropped later,
    because dropping drawn nodes by their tokens would bias the output.
    """

    def expand(self, nodes, log_probs):
        """Give the next level half of the remaining budget, choose its children best-first, and draw.

        Args:
            nodes: the parents.
            log_probs: `[n, V]`, the log-probabilities of their children.
        """
        n_level = (self.budget - len(self.kept) + 1) // 2
        top = log_probs.topk(min(max(1, n_level), log_probs.shape[1]), dim=-1)
        top_log_probs, top_ids = top.values.tolist(), top.indices.tolist()
        possible = (top.values.exp() > 0).sum(dim=-1).tolist()  # probabilities underflow before their logarithms do
        depth = self.depths[nodes[0]] + 1
        open_nodes = OpenNodes(self.sampling.policy)
        for i, node in enumerate(nodes):
            open_nodes.add(i, self.log_probs[node], top_log_probs[i][: possible[i]], self.sampling.acceptance(depth))
        children = [child for _ in range(n_level) if (child := open_nodes.take())]
        self.newest = []
        for i, node in enumerate(nodes):
            ranks = [(rank, log_reach) for parent, rank, log_reach in children if parent == i]
            inside = [top_ids[i][rank] for rank, _ in ranks if rank >= 0]
            drawn = [log_reach for rank, log_reach in ranks if rank < 0]
            self.newest += [self._append(top_ids[i][rank], node, reach) for rank, reach in ranks if rank >= 0]
            if drawn:
                q, request = log_probs[i].exp(), [(inside, len(drawn))]
                [proposal] = draw_children(q, request, depth, self.sampling.policy, self.sampling.randomness)
                self.proposals[node] = proposal
                self.newest += [
                    self._append(token, node, reach) for token, reach in zip(proposal.tokens, drawn, strict=True)
                ]
        self.kept += self.newest
