"""Requests of every form give plain `generate`'s tokens and use the random state as it does."""

import pytest
import torch
from helpers import assert_close, generate, random_ids, random_states, tree_arguments

import hf_ddtree
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT_LENGTH = 12
NEW_TOKENS = 16
DRAFTERS = ["scripted", "dflash", "causal-lm", "look-up"]


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


DRAFTER_MODELS = {
    "look-up": lambda model: None,
    "causal-LM": lambda model: tiny_model("llama", seed=1),
    "itself": lambda model: model,
    "DFlash": tiny_dflash_drafter,
    "Muse-Glimmer": tiny_muse_glimmer_drafter,
}


@pytest.mark.parametrize("make_drafter", DRAFTER_MODELS.values(), ids=DRAFTER_MODELS)
def test_generate_greedily_leaves_every_global_random_state_alone(make_drafter):
    """On a fresh model, so that its self-check is part of the run."""
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter = make_drafter(model)
    states = random_states()
    model.generate(random_ids(PROMPT_LENGTH), max_new_tokens=10, assistant_model=drafter, tree_budget=8)
    assert random_states() == states


@pytest.mark.parametrize("make_drafter", DRAFTER_MODELS.values(), ids=DRAFTER_MODELS)
def test_generate_with_sampling_uses_the_global_random_state_as_plain_sampling_does(make_drafter):
    """So a script that samples twice after one seed gives the same two texts."""
    model = hf_ddtree.enable(tiny_model("llama"))
    settings = {"max_new_tokens": 10, "do_sample": True}
    plain = generate(model, random_ids(PROMPT_LENGTH), **settings)
    state = torch.get_rng_state()
    options = {"assistant_model": make_drafter(model), "tree_budget": 8, "tree_sampling": "target"}
    tree = generate(model, random_ids(PROMPT_LENGTH), **options, **settings)
    assert tree.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), state)


def assert_tree_equals_plain(model, drafter: str, *inputs, **settings):
    """Assert equal sequences and scores. The script of a scripted drafter is the output without padding."""
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": True, **settings}
    plain = generate(model, *(inputs or [None]), **settings)
    script = plain.sequences
    mask = settings.get("attention_mask")
    if mask is not None and "inputs_embeds" not in settings:
        script = script[:, int(mask[0].argmax()) :]
    tree = generate(model, *(inputs or [None]), **settings, **tree_arguments(drafter, model, script))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    for actual, expected in zip(tree.scores, plain.scores, strict=True):
        assert_close(actual, expected)
    if drafter in ("scripted", "causal-lm"):
        assert tree.tokens_per_round > 1.5, "the drafter was given something else than the sequence"


def embeds_of(model, length: int, seed: int = 0) -> torch.Tensor:
    return model.get_input_embeddings()(random_ids(length, seed)).detach()


def padded(ids: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a left-padded prompt and its mask."""
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long()[None]


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_generate_takes_a_prompt_of_embeddings(model, drafter):
    """Without ids, a text drafter sees the generated tokens only, and a DFlash drafter sees all hidden states."""
    assert_tree_equals_plain(model, drafter, inputs_embeds=embeds_of(model, PROMPT_LENGTH))


def test_generate_takes_a_prompt_of_embeddings_that_a_causal_lm_cannot_see(model):
    inputs = {"inputs_embeds": embeds_of(model, PROMPT_LENGTH), "max_new_tokens": NEW_TOKENS}
    plain, tree = (generate(model, None, **inputs, **more) for more in ({}, tree_arguments("causal-lm", model, None)))
    assert tree.tolist() == plain.tolist()


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_generate_takes_a_left_padded_prompt_of_embeddings(model, drafter):
    mask = torch.tensor([[0] * 4 + [1] * PROMPT_LENGTH])
    assert_tree_equals_plain(model, drafter, inputs_embeds=embeds_of(model, PROMPT_LENGTH + 4), attention_mask=mask)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generate_takes_ids_together_with_embeddings(model, drafter):
    """The model runs the embeddings, and processors and drafters see the ids."""
    ids = random_ids(PROMPT_LENGTH)
    assert_tree_equals_plain(model, drafter, ids, inputs_embeds=model.get_input_embeddings()(ids).detach())


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_generate_takes_a_left_padded_prompt(family, padding, drafter):
    """Padding stays hidden from every node, also where the window has passed it."""
    model = hf_ddtree.enable(tiny_model(family))
    ids, mask = padded(random_ids(PROMPT_LENGTH), padding)
    assert_tree_equals_plain(model, drafter, ids, attention_mask=mask)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generate_with_padding_gives_the_text_without_it(model, drafter):
    """The reference is the prompt without padding, which plain generate's handling of padding cannot influence."""
    expected = generate(model, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS)
    ids, mask = padded(random_ids(PROMPT_LENGTH), 3)
    arguments = tree_arguments(drafter, model, expected)
    tree = generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **arguments)
    assert tree[:, 3:].tolist() == expected.tolist()


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_generate_takes_an_attention_mask_with_a_hole(model, drafter):
    """transformers itself makes one where the prompt contains the padding token."""
    mask = torch.ones(1, PROMPT_LENGTH, dtype=torch.long)
    mask[0, 4:6] = 0
    assert_tree_equals_plain(model, drafter, random_ids(PROMPT_LENGTH), attention_mask=mask)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk_size", [1, 5, PROMPT_LENGTH, 100])
def test_generate_takes_a_prefill_in_chunks(model, drafter, chunk_size):
    assert_tree_equals_plain(model, drafter, random_ids(PROMPT_LENGTH), prefill_chunk_size=chunk_size)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generate_takes_a_padded_prompt_past_the_window_in_chunks(family, drafter):
    model = hf_ddtree.enable(tiny_model(family))
    ids, mask = padded(random_ids(WINDOW + 6), 3)
    assert_tree_equals_plain(model, drafter, ids, attention_mask=mask, prefill_chunk_size=4)


def test_generate_in_chunks_gives_a_dflash_drafter_the_same_context(model):
    """All hidden states of the prompt reach the drafter, not only the last chunk's, so the trees are the same."""
    trees = []
    for chunk_size in [None, 5]:
        output = generate(
            model,
            random_ids(PROMPT_LENGTH),
            max_new_tokens=NEW_TOKENS,
            prefill_chunk_size=chunk_size,
            tree_trace=True,
            return_dict_in_generate=True,
            **tree_arguments("dflash", model, None),
        )
        trees.append([r.tree.token_ids.tolist() for r in output.rounds])
    assert trees[0] == trees[1]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("first", [0, 7])
def test_generate_takes_position_ids(model, drafter, first):
    """Positions may start anywhere and jump. The tree goes on from the last one."""
    positions = torch.arange(first, first + PROMPT_LENGTH)[None]
    positions[:, 6:] += 2
    settings = {"max_new_tokens": NEW_TOKENS, "position_ids": positions}
    plain = generate(model, random_ids(PROMPT_LENGTH), **settings)
    tree = generate(model, random_ids(PROMPT_LENGTH), **settings, **tree_arguments(drafter, model, plain))
    assert tree.tolist() == plain.tolist()
    without = generate(model, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS)
    assert plain.tolist() != without.tolist()  # the positions mattered


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generate_takes_a_prompt_of_one_token(model, drafter):
    assert_tree_equals_plain(model, drafter, random_ids(1))


def test_generate_without_a_prompt_starts_from_the_bos_token(model):
    plain = generate(model, None, max_new_tokens=NEW_TOKENS)
    tree = generate(model, None, max_new_tokens=NEW_TOKENS, **tree_arguments("scripted", model, plain))
    assert tree.tolist() == plain.tolist()
