"""The chain: the drafter's most probable token at every depth."""

import pytest
import torch
from helpers import generate, prefixes, random_ids

import hf_ddtree
from hf_ddtree.drafters.chain import chain_drafter
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model

PROMPT = random_ids(WINDOW + 8, seed=1)


@torch.no_grad()
@pytest.mark.parametrize("tree_budget", [1, 100])
def test_draft_is_the_most_probable_token_of_every_depth_whatever_the_budget(tree_budget):
    target = tiny_model("llama")
    model = tiny_dflash_drafter(target)
    states = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    drafters = [chain_drafter(model, target) for _ in range(2)]
    for drafter in drafters:
        drafter.prefill(states, torch.arange(3)[None])
    root = int(PROMPT[0, -1])
    best = drafters[0].draft_logits(root).argmax(-1).tolist()
    tree = drafters[1].draft(PROMPT, tree_budget, max_depth=3)
    assert int(tree.token_ids[0]) == root
    assert prefixes(tree) == [tuple(best[:depth]) for depth in (1, 2, 3)]


def test_generate_with_a_chain_equals_plain_decoding():
    target = hf_ddtree.enable(tiny_model("llama"))
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = generate(target, PROMPT, **settings)
    drafter = chain_drafter(tiny_dflash_drafter(target), target)
    output = generate(target, PROMPT, assistant_model=drafter, tree_budget=1, tree_trace=True, **settings)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert all(r.tree.parents.tolist() == list(range(-1, r.tree_size)) for r in output.rounds)
    assert max(r.tree_size for r in output.rounds) == drafter.block_size - 1
