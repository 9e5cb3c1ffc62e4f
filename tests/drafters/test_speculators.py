"""DFlash drafters in the layout of the speculators library, compared with the same weights in the z-lab layout."""

import pytest
import torch
from helpers import draft_from_scratch, generate, random_ids, spy_on, write_speculators_drafter

import hf_ddtree
from hf_ddtree.drafters.dflash import DFlashDrafter
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model

PROMPT = random_ids(24, seed=1)
WINDOW, BLOCK_SIZE = 8, 5
# a third of the vocabulary, in ascending order, which the layout requires
KEPT = torch.arange(1, VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def target():
    return hf_ddtree.enable(tiny_model("llama"))


def drafts_of(monkeypatch, target, drafter) -> list[torch.Tensor]:
    """Return the logits of every block, after asserting that the text is the target's own."""
    drafts = []
    with monkeypatch.context() as patch:
        spy_on(patch, DFlashDrafter, "draft_logits", lambda self, args, logits: drafts.append(logits))
        settings = {"max_new_tokens": 24, "do_sample": False}
        output = generate(target, PROMPT, assistant_model=drafter, tree_budget=20, **settings)
    assert torch.equal(output, generate(target, PROMPT, **settings))
    return drafts


def test_draft_logits_equal_those_of_the_z_lab_layout(target, tmp_path, monkeypatch):
    drafter = hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target))
    expected = drafts_of(monkeypatch, target, tiny_dflash_drafter(target))
    drafts = drafts_of(monkeypatch, target, drafter)
    assert len(drafts) > 6
    for logits, wanted in zip(drafts, expected, strict=True):
        torch.testing.assert_close(logits, wanted)


def test_logits_of_a_reduced_head_cover_the_tokens_it_has(target, tmp_path):
    drafter = hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target, KEPT))
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits, full = drafter.logits(states), target.get_output_embeddings()(states)
    torch.testing.assert_close(logits[:, KEPT], full[:, KEPT])
    others = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, KEPT, False)
    assert (logits[:, others] == -torch.inf).all()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["target", "hybrid"])
def test_generate_equals_plain_decoding_with_a_reduced_head(target, tmp_path, settings, policy):
    drafter = hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target, KEPT))
    outputs = []
    for options in ({}, {"assistant_model": drafter, "tree_budget": 60, "tree_sampling": policy}):
        outputs.append(generate(target, PROMPT, max_new_tokens=24, **options, **settings))
    assert outputs[0].shape == outputs[1].shape
    if policy == "target" or not settings["do_sample"]:
        assert torch.equal(*outputs)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}


@pytest.mark.parametrize("non_causal", [False, True])
def test_sliding_layers_see_the_window_before_the_root_and_the_block(target, tmp_path, non_causal):
    path = write_speculators_drafter(tmp_path, target, layers=SLIDING, sliding_window_non_causal=non_causal)
    drafter = hf_ddtree.load_drafter(path)
    n_context = 20
    mask = drafter._sliding_mask(torch.zeros(1, BLOCK_SIZE, 32), n_context, cache=None)[0, 0] == 0
    for slot in range(BLOCK_SIZE):
        for key in range(n_context + BLOCK_SIZE):
            in_window = n_context - WINDOW <= key < n_context
            in_block = key >= n_context and (non_causal or key - n_context <= slot)
            assert bool(mask[slot, key]) == (in_window or in_block)


@pytest.mark.parametrize("non_causal", [False, True])
@torch.no_grad()
def test_draft_logits_of_sliding_layers_equal_those_without_a_cache(target, tmp_path, monkeypatch, non_causal):
    path = write_speculators_drafter(tmp_path, target, KEPT, layers=SLIDING, sliding_window_non_causal=non_causal)
    drafter = hf_ddtree.load_drafter(path)
    drafts, sequences = [], []
    spy_on(monkeypatch, DFlashDrafter, "draft_logits", lambda self, args, logits: drafts.append(logits))
    spy_on(monkeypatch, DFlashDrafter, "draft", lambda self, args, tree: sequences.append(args[0]))
    generate(target, PROMPT, max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=20)
    for logits, sequence in zip(drafts, sequences, strict=True):
        expected = draft_from_scratch(drafter, target, sequence, embed=drafter.embed_tokens, head=drafter.logits)
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)  # fp32 rounding over the layers


@torch.no_grad()
def test_draft_logits_from_the_embedding_equal_those_without_a_cache(target, tmp_path, monkeypatch):
    """Index 0 of this layout is the output of the embedding, before the first layer."""
    path = write_speculators_drafter(tmp_path, target, KEPT, aux_hidden_state_layer_ids=[0, 3])
    drafter = hf_ddtree.load_drafter(path)
    drafts, sequences = [], []
    spy_on(monkeypatch, DFlashDrafter, "draft_logits", lambda self, args, logits: drafts.append(logits))
    spy_on(monkeypatch, DFlashDrafter, "draft", lambda self, args, tree: sequences.append(args[0]))
    generate(target, PROMPT, max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=20)
    assert len(drafts) > 6
    for logits, sequence in zip(drafts, sequences, strict=True):
        context, layers = sequence[:, :-1], target.model
        positions = torch.arange(context.shape[1] + BLOCK_SIZE)[None]
        states = layers(input_ids=context, output_hidden_states=True).hidden_states
        block = torch.tensor([[int(sequence[0, -1])] + [3] * (BLOCK_SIZE - 1)])
        hidden = drafter(
            noise_embeds=drafter.embed_tokens(block),
            context_hidden_states=torch.cat([layers.embed_tokens(context), states[3]], dim=-1),
            position_ids=positions,
        )
        expected = drafter.logits(hidden.last_hidden_state)[0, 1:]
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)  # fp32 rounding over the layers


def test_draft_logits_with_sample_from_anchor_hold_one_more_token(target, tmp_path, monkeypatch):
    drafter = hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target, sample_from_anchor=True))
    assert {len(logits) for logits in drafts_of(monkeypatch, target, drafter)[:-BLOCK_SIZE]} == {BLOCK_SIZE}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"speculators_model_type": "dspark"}, "type 'dspark' is not a DFlash drafter"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"aux_hidden_state_layer_ids": None}, "target_layer_ids"),
        ({"weights": {"embed_tokens.weight": None}}, "missing keys .*embed_tokens"),
        ({"weights": {"d2t": None}}, "missing keys .*d2t"),
        ({"weights": {"markov.weight": torch.zeros(3)}}, "unexpected keys .*markov"),
        ({"weights": {"d2t": torch.full((len(KEPT),), VOCAB_SIZE)}}, "d2t does not map"),
        ({"weights": {"d2t": -torch.arange(len(KEPT))}}, "d2t does not map"),
    ],
)
def test_load_drafter_names_what_does_not_fit(target, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target, KEPT, **change))


@pytest.mark.parametrize("index", [-1, 5])
def test_check_dflash_refuses_layers_of_another_target(target, tmp_path, index):
    drafter = hf_ddtree.load_drafter(write_speculators_drafter(tmp_path, target, aux_hidden_state_layer_ids=[1, index]))
    with pytest.raises(ValueError, match="target_layer_ids"):
        generate(target, PROMPT, max_new_tokens=4, assistant_model=drafter, tree_budget=4)
