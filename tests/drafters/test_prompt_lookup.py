"""Prompt look-up: the matches of the longest suffix, and the trie of what followed them."""

import math

import numpy as np
import torch
from helpers import prefixes
from hypothesis import given
from hypothesis import strategies as st

from hf_ddtree.drafters.prompt_lookup import (
    CONTINUATION,
    PromptLookupDrafter,
    longest_suffix_matches,
    merge_into_trie,
)
from hf_ddtree.request import DEFAULT_LOOKUP_DEPTH, DEFAULT_LOOKUP_MATCH


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6))
def test_longest_suffix_matches_equals_trying_all_lengths(tokens, longest):
    n = len(tokens)
    expected = []
    for size in range(min(longest, n - 1), 0, -1):
        suffix = tokens[n - size :]
        expected = [end for end in range(size - 1, n - 1) if tokens[end - size + 1 : end + 1] == suffix]
        if expected:
            break
    assert longest_suffix_matches(np.array(tokens), longest).tolist() == expected


def look_up(tokens, tree_budget, max_depth=100, lookup_depth=DEFAULT_LOOKUP_DEPTH, lookup_match=DEFAULT_LOOKUP_MATCH):
    """Return the drafted prefixes."""
    drafter = PromptLookupDrafter(lookup_depth, lookup_match)
    return prefixes(drafter.draft(torch.tensor([tokens]), tree_budget, max_depth))


def test_draft_merges_continuations_and_puts_the_most_recent_first():
    tokens = [1, 2, 7, 8, 1, 2, 7, 9, 1, 2]
    assert look_up(tokens, 100, lookup_depth=2) == [(7,), (7, 9), (7, 8)]
    assert look_up(tokens, 2, lookup_depth=2) == [(7,), (7, 9)]


def test_draft_without_a_match_is_the_root_alone():
    assert look_up([1, 2, 3], 8) == []
    assert look_up([1], 8) == []


def test_draft_is_no_deeper_than_either_limit():
    tokens = [1, 2, 3, 4, 5, 1]
    assert look_up(tokens, 8) == [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 1)]
    assert look_up(tokens, 8, max_depth=2) == look_up(tokens, 8, lookup_depth=2) == [(2,), (2, 3)]


def test_draft_compares_no_longer_suffix_than_max_match():
    tokens = [1, 2, 7, 3, 2, 8, 1, 2]
    assert look_up(tokens, 8, lookup_depth=1, lookup_match=2) == [(7,)]
    assert look_up(tokens, 8, lookup_depth=1, lookup_match=1) == [(8,), (7,)]


def test_merge_into_trie_estimates_reach_by_share_and_depth():
    tree = merge_into_trie(5, [[7, 9], [7, 8], [6]], tree_budget=10)
    assert int(tree.token_ids[0]) == 5 and prefixes(tree) == [(7,), (7, 9), (7, 8), (6,)]
    reach = [1, 2 / 3 * CONTINUATION, 1 / 3 * CONTINUATION**2, 1 / 3 * CONTINUATION**2, 1 / 3 * CONTINUATION]
    torch.testing.assert_close(tree.log_reach, torch.tensor([math.log(value) for value in reach]))
