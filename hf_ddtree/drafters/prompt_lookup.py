"""Drafting without a model: the tokens that followed the same tokens earlier in the text."""

import math
from collections.abc import Iterable

import numpy as np

from ..tree import DraftTree
from .base import Drafter

CONTINUATION = 0.8  # the assumed probability that a repetition goes on. It decides the order of nodes only.


class PromptLookupDrafter(Drafter):
    """Drafts a trie of the earlier continuations of the longest matching suffix, the most recent ones first.

    Args:
        max_depth: the depth of the trie (`prompt_lookup_num_tokens` of `generate`).
        max_match: the longest suffix to compare, in tokens (`max_matching_ngram_size` of `generate`).
    """

    def __init__(self, max_depth: int, max_match: int):
        self.max_depth, self.max_match = max_depth, max_match

    def draft(self, input_ids, tree_budget, max_depth):
        """Return the tree of the next round."""
        tokens = input_ids[0].numpy(force=True)
        depth = min(self.max_depth, max_depth)
        ends = longest_suffix_matches(tokens, self.max_match)
        continuations = (tokens[end + 1 : end + 1 + depth].tolist() for end in ends[::-1])
        return merge_into_trie(int(tokens[-1]), continuations, tree_budget)


def longest_suffix_matches(tokens: np.ndarray, longest: int) -> np.ndarray:
    """Return the ends of all earlier occurrences of the longest suffix that occurred before, ascending.

    The search starts from the occurrences of the last token. It keeps those that also match one token further back, as
    long as there are any.

    Args:
        tokens: `[S]` int64.
        longest: the longest suffix to compare, in tokens.
    """
    last = len(tokens) - 1
    ends = (tokens[:last] == tokens[last]).nonzero()[0]
    for back in range(1, min(longest, last)):
        candidates = ends[ends >= back]
        longer = candidates[tokens[candidates - back] == tokens[last - back]]
        if len(longer) == 0:
            break
        ends = longer
    return ends


def merge_into_trie(root_token_id: int, continuations: Iterable[list[int]], tree_budget: int) -> DraftTree:
    """Merge sequences into a tree, in order, until it has `tree_budget` drafted nodes.

    The estimated probability of reaching a node is (its share of the sequences) CONTINUATION^depth.

    Args:
        root_token_id: the token of the root.
        continuations: sequences of tokens that follow the root.
        tree_budget: the number of drafted nodes.
    """
    token_ids, parents, depths, visits = [root_token_id], [-1], [0], [0]
    node_of: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        if len(token_ids) > tree_budget:
            break
        node = 0
        visits[0] += 1
        for token in continuation:
            if (node, token) not in node_of:
                if len(token_ids) > tree_budget:
                    break
                node_of[node, token] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                visits.append(0)
            node = node_of[node, token]
            visits[node] += 1
    log_reach = [
        math.log(n / visits[0]) + depth * math.log(CONTINUATION) if depth else 0.0
        for n, depth in zip(visits, depths, strict=True)
    ]
    return DraftTree.from_lists(token_ids, parents, log_reach=log_reach)
