"""What a DFlash drafter drafts, against the block computed from scratch in every round."""

import pytest
import torch
from helpers import draft_from_scratch, generate, prefixes, random_ids, spy_on, target_of
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import hf_ddtree
from hf_ddtree import POLICIES, build_tree
from hf_ddtree.drafters.dflash import DFlashDrafter, embed_without_norm
from hf_ddtree.drafters.q import DraftSampling
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT = random_ids(WINDOW + 8, seed=1)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over the layers of target and drafter


def drafter_after(model, target, n: int, first: float = 0.0, temperature: float = 1.0) -> DFlashDrafter:
    """Return a drafter after a prefill of n random states. `first` fills the first of them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    drafter = DFlashDrafter(model, target, DraftSampling(POLICIES["target"], warpers))
    states = torch.randn(1, n, 64, generator=torch.Generator().manual_seed(0))
    if first:
        states[:, 0] = first
    drafter.prefill(states, torch.arange(n)[None])
    return drafter


@pytest.mark.parametrize("kind", ["z-lab", "Muse Glimmer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "muse_glimmer", "llama beyond its positions"])
@torch.no_grad()
def test_draft_starts_from_the_accepted_path_in_every_round(kind, family, monkeypatch):
    target = hf_ddtree.enable(target_of(family))
    model = tiny_dflash_drafter(target) if kind == "z-lab" else tiny_muse_glimmer_drafter(target)
    if kind == "Muse Glimmer":  # with a window, drafting from scratch would see what the cache has dropped
        model.config.layer_types = ["full_attention"] * 2
    drafts, sequences = [], []
    spy_on(monkeypatch, DFlashDrafter, "draft_logits", lambda self, args, logits: drafts.append(logits))
    spy_on(monkeypatch, DFlashDrafter, "draft", lambda self, args, tree: sequences.append(args[0]))
    generate(target, PROMPT, max_new_tokens=24, do_sample=False, assistant_model=model, tree_budget=40)
    assert len(drafts) > 6
    for logits, sequence in zip(drafts, sequences, strict=True):
        torch.testing.assert_close(logits, draft_from_scratch(model, target, sequence), **TOLERANCE)


@torch.no_grad()
def test_draft_builds_the_tree_of_the_marginals():
    target = tiny_model("llama")
    model = tiny_dflash_drafter(target)
    logits = drafter_after(model, target, 3).draft_logits(int(PROMPT[0, -1]))
    tree = drafter_after(model, target, 3).draft(PROMPT, 20, max_depth=2)
    assert int(tree.token_ids[0]) == int(PROMPT[0, -1]) and int(tree.depths.max()) == 2
    assert prefixes(tree) == prefixes(build_tree(logits[:2], 20))


@torch.no_grad()
def test_draft_logits_depend_on_the_context_within_the_window_only():
    """The drafter's cache counts the window, so both models run as they do in generation."""
    target = tiny_model("llama")
    windowed = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    full, sliding = tiny_dflash_drafter(target), tiny_dflash_drafter(target, **windowed)
    for model, reaches in ((full, True), (sliding, False)):
        drafts = [drafter_after(model, target, 20, first).draft_logits(int(PROMPT[0, -1])) for first in (5, 6)]
        assert torch.equal(*drafts) != reaches


def test_draft_spreads_by_temperature():
    """A hot request spreads the budget over siblings, and a cold one spends it on depth."""
    target = tiny_model("llama")
    model = tiny_dflash_drafter(target)
    trees = [drafter_after(model, target, 3, temperature=value).draft(PROMPT, 8, 10) for value in (0.01, 100.0)]
    assert [int(tree.depths.max()) for tree in trees] == [4, 1]


def test_draft_draws_children_if_the_policy_does():
    target = tiny_model("llama")
    drafter = drafter_after(tiny_dflash_drafter(target), target, 3)
    drafter.sampling.policy = POLICIES["swor"]
    tree = drafter.draft(PROMPT, 8, 10)
    assert tree.proposals and all(not proposal.inside for proposal in tree.proposals.values())


def test_embed_without_norm_skips_the_normalisation_of_muse_glimmer():
    embedding = tiny_model("muse_glimmer").get_input_embeddings()
    assert torch.equal(embed_without_norm(embedding, PROMPT), embedding.weight[PROMPT])
    assert not torch.equal(embedding(PROMPT), embedding.weight[PROMPT])
    plain = tiny_model("llama").get_input_embeddings()
    assert torch.equal(embed_without_norm(plain, PROMPT), plain(PROMPT))
