"""How many nodes a round drafts and verifies: a fixed number, or those that are worth their time on this machine."""

import time

import numpy as np

from ..request import Request
from ..target.target import Target
from ..tree import DraftTree
from .cost import VerifyCost
from .history import MAX_CARRIED_WEIGHT, History, history_of
from .store import verify_cost

MAX_AUTO_NODES = 1024
INITIAL_LIMIT = 32  # drafted nodes of the first round
INITIAL_DRAFT_SHARE = 0.2  # the assumed time of drafting before the first draft, relative to verifying one node
MAX_PAUSE = 64  # rounds between two attempts at drafting where it does not pay
TOLERATED_LOSS = 0.01  # of speed before drafting pauses, because an attempt that finds nothing to verify costs little


def make_budget(request: Request, target: Target, assistant_model: object, length: int) -> "Budget":
    """Return the budget of one request.

    Args:
        request: the request.
        target: the target, before its prefill.
        assistant_model: what the user passed. The automatic budget remembers what rounds with a model have shown.
        length: the number of tokens in the prompt.
    """
    if isinstance(request.tree_budget, int):
        return Budget(request.tree_budget)
    cost = verify_cost(target.model, target.device, target.attention)
    return CostAwareBudget(cost, length, history_of(assistant_model, target.model, request.temperature))


class Budget:
    """The same number of nodes in every round.

    A round calls `begin_round`, drafts, calls `select_nodes`, and ends with `end_round`. Trees and paths come in lists
    with one entry per row of the batch. Today a batch has one row.

    Args:
        limit: drafted nodes per round, root excluded.
    """

    def __init__(self, limit: int):
        self.limit = limit

    def begin_round(self, max_depth: int) -> int:
        """Begin a round, and return how many nodes to draft, 0 for no draft.

        Args:
            max_depth: the depth of the deepest useful node, which may be 0.
        """
        return self.limit if max_depth > 0 else 0

    def select_nodes(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Return the trees to verify, out of the drafted ones.

        Args:
            trees: one drafted tree per row, or the root alone in a round without a draft.
        """
        return trees

    def drafted_paths(self, paths: list[list[int]]) -> list[list[int]]:
        """Return paths with the node indices of the drafted trees.

        Args:
            paths: per row, node indices of the tree that was selected in this round.
        """
        return paths

    def end_round(self, paths: list[list[int]]) -> None:
        """End a round.

        Args:
            paths: per row, the accepted path, as node indices of the selected tree.
        """


class CostAwareBudget(Budget):
    """The n nodes that maximise (1 + expected accepted) / (C_draft + C_verify(n, L)), selected anew in every round.

    Nodes are ordered by the drafter's own estimate of reaching them, corrected by how often nodes with such an estimate
    were accepted in earlier rounds. Costs are those measured on this machine, scaled by the time that rounds really
    take. Where drafting does not pay, it pauses and tries again after 1, 2, 4, .. rounds and in every request. The
    selection depends on earlier rounds and on q, never on a drawn token, so every policy stays exact.

    Args:
        cost: C_verify.
        length: L, the number of committed tokens at the start.
        history: what earlier rounds have shown. It is updated.

    Source: CaDDTree (arXiv 2606.01813).
    """

    def __init__(self, cost: VerifyCost, length: int, history: History):
        super().__init__(INITIAL_LIMIT)
        self.cost, self.length, self.history = cost, length, history
        history.begin_request()
        self.skip = 0  # rounds without a draft that are still to come
        self._start, self._drafting = 0.0, False
        self._tree = DraftTree.chain([-1])  # the tree that was selected in this round
        self._nodes: list[int] | None = None  # its nodes as the drafter counts them, None if these are the same

    def begin_round(self, max_depth):
        """Begin a round, and return how many nodes to draft, 0 for no draft."""
        self._start = time.perf_counter()
        limit = super().begin_round(max_depth) if self.skip == 0 else 0
        self._drafting = limit > 0
        self.skip = max(0, self.skip - 1)
        return limit

    def select_nodes(self, trees):
        """Return the trees to verify, out of the drafted ones."""
        [drafted] = trees
        self._tree, self._nodes = drafted, None
        if self._drafting:
            draft_seconds = self._draft_seconds(time.perf_counter() - self._start)
            if drafted.log_reach is not None:
                log_reach = drafted.log_reach[1:].double().numpy()
                order = np.argsort(-log_reach, kind="stable")  # parents first
                n = self._best_size(log_reach[order], draft_seconds)
                self._nodes = [0, *sorted((order[:n] + 1).tolist())]
                self._tree = drafted.subtree(self._nodes)
        return [self._tree]

    def drafted_paths(self, paths):
        """Return paths with the node indices of the drafted trees."""
        nodes = self._nodes
        return paths if nodes is None else [[nodes[node] for node in path] for path in paths]

    def end_round(self, paths):
        """End a round, and learn from its time and its accepted path."""
        [path] = paths
        history, tree = self.history, self._tree
        seconds = time.perf_counter() - self._start
        draft_seconds = history.draft_seconds.value if self._drafting else 0.0
        alone, verify = self.cost.seconds(np.array([1, len(tree)]), self.length)
        history.scale.update(max(seconds - draft_seconds, 0.0) / verify)
        self.length += len(path)
        if self._drafting:
            self._update_acceptance(path)
            # modelled times, whose noise has been averaged out
            alone, seconds = history.scale.value * alone, draft_seconds + history.scale.value * verify
            self._update_pause(len(path), seconds, alone)

    def _draft_seconds(self, seconds: float) -> float:
        """Return the expected time of drafting, and then add the time of this draft to the average.

        The time of this draft does not count for this round, because drawing takes longer for some tokens than for
        others.
        """
        average, alone = self.history.draft_seconds, float(self.cost.seconds(1, self.length))
        expected = average.value or INITIAL_DRAFT_SHARE * self.history.scale.value * alone
        average.update(seconds)
        return expected

    def _best_size(self, log_reach: np.ndarray, draft_seconds: float) -> int:
        """Return how many drafted nodes to verify, and set the number of nodes to draft in the next round.

        Args:
            log_reach: the estimates of the drafted nodes, best first.
            draft_seconds: C_draft.
        """
        expected = 1 + np.cumsum([0.0, *self.history.acceptance.expected(log_reach)])
        costs = self.history.scale.value * self.cost.seconds(np.arange(1, len(expected) + 1), self.length)
        n = int(np.argmax(expected / (draft_seconds + costs)))
        self.limit = min(max(2 * n, INITIAL_LIMIT), MAX_AUTO_NODES)
        return n

    def _update_acceptance(self, path: list[int]) -> None:
        if self._tree.log_reach is not None:
            accepted = np.zeros(len(self._tree), dtype=bool)
            accepted[path] = True
            self.history.acceptance.update(self._tree.log_reach[1:].double().numpy(), accepted[1:])

    def _update_pause(self, n_tokens: int, seconds: float, alone: float) -> None:
        """Pause drafting if it was slower than rounds without a draft.

        Args:
            n_tokens: the tokens of this round.
            seconds: its time.
            alone: the time of verifying the root alone.
        """
        history = self.history
        history.tokens.update(n_tokens)
        history.seconds.update(seconds)
        if n_tokens * alone > seconds:
            history.pause = 1  # drafting may pay again
        # A request inherits at most MAX_CARRIED_WEIGHT, so its own first draft always counts before a pause. A tree
        # trimmed to its root counts as evidence at once.
        judged = history.tokens.weight > MAX_CARRIED_WEIGHT or len(self._tree) == 1
        if judged and history.tokens.value * alone < (1 - TOLERATED_LOSS) * history.seconds.value:
            self.skip, history.pause = history.pause, min(2 * history.pause, MAX_PAUSE)
