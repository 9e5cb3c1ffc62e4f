"""The small drafters."""

import torch

from hf_ddtree.testing import ScriptedDrafter, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

SCRIPT = list(range(10, 30))


def test_scripted_drafter_drafts_the_script():
    tree = ScriptedDrafter(SCRIPT, hit_rate=1.0).draft(torch.tensor([SCRIPT[:5]]), tree_budget=60, max_depth=3)
    node = 0
    for token in SCRIPT[5:8]:
        node = tree.child(node, token)
        assert node is not None


def test_scripted_drafter_keeps_to_the_budget():
    tree = ScriptedDrafter(SCRIPT).draft(torch.tensor([SCRIPT[:5]]), tree_budget=7, max_depth=9)
    assert len(tree) <= 8


def test_tiny_drafters_read_layers_of_their_target():
    target = tiny_model("llama", num_hidden_layers=6)
    for drafter in (tiny_dflash_drafter(target), tiny_muse_glimmer_drafter(target)):
        assert not drafter.training
        assert all(0 <= layer < 6 for layer in drafter.config.target_layer_ids)
        assert drafter.config.hidden_size == target.config.hidden_size
