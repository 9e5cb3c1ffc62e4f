"""Drafting without a model: what followed the last tokens earlier in the text."""

import math

import numpy as np
from transformers.generation import GenerationConfig

from ..tree import DraftTree
from .base import TreeCandidateGenerator

# a longer common suffix says nothing more about the next token, and looping text would make the search long
LONGEST_MATCH = 16
DEFAULT_DEPTH = 10
CONTINUES = 0.8  # how probable it is that a text that repeats itself goes on to do so; only the order of nodes matters


class PromptLookupTreeGenerator(TreeCandidateGenerator):
    """A trie of the earlier continuations of the longest matching suffix, the most recent ones first.

    `prompt_lookup_num_tokens` bounds the depth and `max_matching_ngram_size` the suffix, as in native prompt look-up.
    """

    def __init__(self, generation_config: GenerationConfig):
        self.depth = generation_config.prompt_lookup_num_tokens or DEFAULT_DEPTH
        self.longest_match = generation_config.max_matching_ngram_size or LONGEST_MATCH

    def get_candidates(self, input_ids, tree_budget, max_depth):
        tokens = input_ids[0].numpy(force=True)
        depth = min(self.depth, max_depth)
        ends = longest_suffix_matches(tokens, self.longest_match)
        continuations = (tokens[end + 1 : end + 1 + depth].tolist() for end in ends[::-1])
        return merge_into_trie(int(tokens[-1]), continuations, tree_budget)


def longest_suffix_matches(tokens: np.ndarray, longest: int) -> np.ndarray:
    """The ends of all earlier occurrences of the longest suffix of `tokens` that occurred before, ascending.

    Starts from the occurrences of the last token and keeps those that also match one token further back, while any do.
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


def merge_into_trie(root_token_id: int, continuations, tree_budget: int) -> DraftTree:
    """Merge sequences into a tree, in order, until it has `tree_budget` drafted nodes.

    A node is estimated to be reached with probability (its share of the sequences) CONTINUES^depth.
    """
    token_ids, parents, depths, visits = [root_token_id], [-1], [0], [0]
    node_of = {}
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
        math.log(n / visits[0]) + depth * math.log(CONTINUES) if depth else 0.0 for n, depth in zip(visits, depths)
    ]
    return DraftTree.from_lists(token_ids, parents, log_reach=log_reach)
