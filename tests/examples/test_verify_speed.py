"""examples/measure/verify_speed.py."""

import torch
from helpers import random_ids

from hf_ddtree.target.target import Target
from hf_ddtree.testing import tiny_model


def test_verification_leaves_the_cache_as_it_was(script):
    target = Target.after(tiny_model("llama"), random_ids(6)[0])
    with torch.no_grad(), target.decoding():
        for n_nodes in (1, 5):
            verify = script("verify_speed").verification(target, n_nodes)
            verify()
            verify()
            assert target.cache.get_seq_length() == 6


def test_wide_tree_has_three_children_per_node(script):
    assert script("verify_speed").wide_tree(6).parents.tolist() == [-1, 0, 0, 0, 1, 1]
