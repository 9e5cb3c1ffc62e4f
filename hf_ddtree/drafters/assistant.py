"""Drafting with a small causal language model that shares the target's vocabulary."""

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache import commit_path
from ..masks import tree_attention_mask
from ..tree import DraftTree, OpenNodes, Proposal, draw_children
from .base import DraftSampling, TreeCandidateGenerator


class AssistantTreeGenerator(TreeCandidateGenerator):
    """Grows the tree level by level: q is conditional on the path, so each level costs one forward of the drafter.

    After each level the best `tree_budget` nodes by path probability stay. Growth ends when no new node is among them,
    at `num_assistant_tokens` levels, or when the drafter itself finds it unlikely that the walk gets that far: when the
    path probabilities of a level sum to less than `assistant_confidence_threshold`. Both settings are the drafter's own
    generation_config, as in native assisted generation.

    With drawn children nothing is dropped any more once it was drawn: each level gets a share of the budget.

    Args:
        assistant: the drafter.
        sampling: how to choose children.
    """

    def __init__(self, assistant: PreTrainedModel, sampling: DraftSampling):
        defaults = assistant.generation_config._get_default_generation_params()
        own = assistant.generation_config
        self.assistant = assistant
        self.sampling = sampling
        self.depth = own.num_assistant_tokens or defaults["num_assistant_tokens"]
        threshold = own.assistant_confidence_threshold
        self.confidence = defaults["assistant_confidence_threshold"] if threshold is None else threshold
        # full layers, windows by mask: a sliding layer would count the rows of a tree as if they were a sequence
        self.cache = DynamicCache()
        self.device = assistant.device
        self.committed = 0  # tokens of the sequence in the cache
        self.row_of = {}  # tree node -> row among the nodes evaluated this round
        self.evaluated = 0  # the number of these rows

    def get_candidates(self, input_ids, tree_budget, max_depth):
        offloaded = self.assistant.device.type == "meta"
        self.device = input_ids.device if offloaded else self.assistant.device
        root_log_probs = self._extend(input_ids[:, self.committed :])
        self.committed = input_ids.shape[1]
        make_growth = _DrawnGrowth if self.sampling.policy.drawn else _Growth
        growth = make_growth(int(input_ids[0, -1]), tree_budget, self.sampling)
        growth.expand([0], root_log_probs)
        for _ in range(1, min(self.depth, max_depth)):
            frontier = growth.frontier()
            if not frontier or growth.probability(frontier) < self.confidence:
                break
            growth.expand(frontier, self._evaluate(growth, frontier))
        tree, self.row_of = growth.finish()
        self.evaluated = len(growth.evaluated)
        return tree

    def commit_path(self, path, hidden_states):
        # only the upper part of the path was evaluated; the rest runs with the next root
        rows = [self.row_of[node] for node in path if node in self.row_of]
        commit_path(self.cache, rows, self.evaluated)
        self.committed += len(rows)
        self.row_of, self.evaluated = {}, 0  # a round may pass without a tree of ours

    def _extend(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.committed, self.committed + tokens.shape[1])[None]
        return self._forward(tokens, positions, attention_mask=None, logits_to_keep=1)

    def _evaluate(self, growth: "_Growth", frontier: list[int]) -> torch.Tensor:
        visible = growth.evaluate(frontier)
        depths = torch.tensor([growth.depths[node] for node in growth.evaluated])
        query_depths = depths[-len(frontier) :]
        mask = tree_attention_mask(
            self.assistant.config.get_text_config(decoder=True),
            self.cache,
            query_depths - 1,  # the root is committed here, so a node at depth 1 follows the last cached token
            depths - 1,
            visible,
            padding_mask=None,
            dtype=self.assistant.dtype,
            device=self.device,
        )
        tokens = torch.tensor([[growth.token_ids[node] for node in frontier]])
        positions = (self.committed - 1 + query_depths)[None]
        return self._forward(tokens, positions, mask, logits_to_keep=len(frontier))

    def _forward(self, tokens, positions, attention_mask, logits_to_keep) -> torch.Tensor:
        keep = {"logits_to_keep": logits_to_keep} if self.assistant._supports_logits_to_keep() else {}
        outputs = self.assistant(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=attention_mask,
            cache=self.cache,
            use_cache=True,
            **keep,
        )
        logits = outputs.logits[0, -logits_to_keep:]
        if logits.isnan().any():
            raise ValueError("assistant_model: its logits contain NaN; its weights are broken, or its dtype overflows.")
        return self.sampling.warp(logits).log_softmax(dim=-1)


class _Growth:
    """The candidate nodes of a tree that grows level by level, and which of them are among the best so far."""

    def __init__(self, root_token_id: int, tree_budget: int, sampling: DraftSampling):
        self.budget = tree_budget
        self.sampling = sampling
        self.proposals: dict[int, Proposal] = {}
        self.token_ids, self.parents, self.depths, self.log_probs = [root_token_id], [-1], [0], [0.0]
        self.kept: list[int] = []
        self.newest: list[int] = []
        self.evaluated: list[int] = []  # nodes with a row in the drafter's cache, in order
        self.visible = torch.zeros(0, 0, dtype=torch.bool)  # [evaluated, evaluated], the ancestor relation

    def expand(self, nodes: list[int], log_probs: torch.Tensor) -> None:
        """Add the best children of `nodes`, `log_probs` `[n, V]`, and keep the best `budget` nodes of all."""
        vocab_size = log_probs.shape[1]
        path_log_probs = torch.tensor([self.log_probs[node] for node in nodes], device=log_probs.device)
        scores = (log_probs + path_log_probs[:, None]).flatten()
        best, index = scores.topk(min(self.budget, len(scores)))
        new = []
        for score, flat in zip(best.tolist(), index.tolist()):
            if score == float("-inf"):
                break
            new.append(self._append(flat % vocab_size, nodes[flat // vocab_size], score))
        self.newest = new
        # a stable sort: a parent is at least as probable as its children and precedes them, so none loses its parent
        self.kept = sorted(self.kept + new, key=lambda node: -self.log_probs[node])[: self.budget]

    def _append(self, token_id: int, parent: int, log_prob: float) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.log_probs.append(log_prob)
        return len(self.token_ids) - 1

    def frontier(self) -> list[int]:
        """The nodes of the newest level that are still kept."""
        kept = set(self.kept)
        return [node for node in self.newest if node in kept]

    def probability(self, nodes: list[int]) -> float:
        """The drafter's probability that the walk reaches one of `nodes`."""
        return float(torch.tensor([self.log_probs[node] for node in nodes]).exp().sum())

    def evaluate(self, frontier: list[int]) -> torch.Tensor:
        """Append `frontier` to the evaluated nodes; returns its rows of the ancestor relation, `[n, evaluated]`."""
        row_of = {node: row for row, node in enumerate(self.evaluated)}
        n, rows = len(frontier), len(self.evaluated)
        # a child sees what its parent sees, and itself; -1 stands for children of the root, which see no other node
        parent_rows = [row_of.get(self.parents[node], -1) for node in frontier]
        inherited = torch.cat([self.visible, self.visible.new_zeros(1, rows)])[parent_rows]
        visible = torch.cat([inherited, torch.eye(n, dtype=torch.bool)], dim=1)
        self.visible = torch.cat([torch.nn.functional.pad(self.visible, (0, n)), visible])
        self.evaluated += frontier
        return visible

    def finish(self) -> tuple[DraftTree, dict[int, int]]:
        """The tree of the kept nodes, and the cache row of each tree node that was evaluated."""
        order = [0, *self.kept]
        index = {node: i for i, node in enumerate(order)}
        parents = [-1, *(index[self.parents[node]] for node in order[1:])]
        proposals = {index[node]: proposal for node, proposal in self.proposals.items()}
        log_reach = [self.log_probs[node] for node in order] if not proposals else None  # q depends on drawn parents
        tree = DraftTree.from_lists([self.token_ids[node] for node in order], parents, proposals, log_reach)
        rows = {index[node]: row for row, node in enumerate(self.evaluated) if node in index}
        return tree, rows


class _DrawnGrowth(_Growth):
    """Growth with drawn children. `log_probs` are then estimates of the walk reaching a node.

    At each level the number of children of every node is fixed before any of them is drawn. Every node counts against
    the budget for good: dropping drawn nodes by their tokens would bias the output.
    """

    def expand(self, nodes, log_probs):
        """Give the level half of what is left of the budget, best-first over `nodes`, and draw."""
        n_level = (self.budget - len(self.kept) + 1) // 2
        top = log_probs.topk(min(max(1, n_level), log_probs.shape[1]), dim=-1)
        top_log_probs, top_ids = top.values.tolist(), top.indices.tolist()
        possible = (top.values.exp() > 0).sum(dim=-1).tolist()  # probabilities underflow before their logarithms
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
                self.newest += [self._append(token, node, reach) for token, reach in zip(proposal.tokens, drawn)]
        self.kept += self.newest
