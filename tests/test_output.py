"""What `generate` returns and streams beside the tokens, and the forms a prompt can have, equal plain `generate`'s."""

import math
from threading import Thread

import pytest
import torch
from helpers import char_tokenizer, generate, random_ids, scripted
from transformers import TextIteratorStreamer, TextStreamer

import hf_ddtree
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model

PROMPT_LENGTH = 12
NEW_TOKENS = 16
DRAFTERS = ["scripted", "dflash", "causal-lm", "look-up"]
ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


def tree_arguments(name: str, model, sequence) -> dict:
    """A drafter of the kind `name` for a request whose output is `sequence`."""
    drafter = {
        "scripted": lambda: scripted(sequence),
        "dflash": lambda: tiny_dflash_drafter(model),
        # the target itself: a drafter that is always right, so that deep paths are accepted
        "causal-lm": lambda: model,
        "look-up": lambda: None,
    }[name]()
    # "target": the policy that keeps to plain sampling's random numbers
    return {"assistant_model": drafter, "tree_budget": 12, "tree_sampling": "target"}


def assert_close(actual, expected):
    """Up to rounding, relative to the largest entry of each tensor."""
    finite = expected[expected.isfinite()]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(finite.abs().max())))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
def test_scores_logits_and_hidden_states_equal_plain_generates(model, drafter, decoding):
    """One entry per emitted token. The processors make scores and logits differ, so that they cannot be confused."""
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.3, **ALL_OUTPUTS, **decoding}
    plain = generate(model, input_ids, **settings)
    tree = generate(model, input_ids, **settings, **tree_arguments(drafter, model, plain.sequences))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert tree.attentions is plain.attentions is None
    for name in ["scores", "logits"]:
        assert len(tree[name]) == len(plain[name]) == NEW_TOKENS
        for actual, expected in zip(tree[name], plain[name]):
            assert_close(actual, expected)
    assert len(tree.hidden_states) == len(plain.hidden_states) == NEW_TOKENS
    for step, expected_step in zip(tree.hidden_states, plain.hidden_states):
        assert len(step) == len(expected_step) == model.config.num_hidden_layers + 1
        for actual, expected in zip(step, expected_step):
            assert_close(actual, expected)


@pytest.mark.parametrize("eos_position", [0, 3, 7])
def test_outputs_end_with_the_last_token_when_eos_falls_inside_a_path(model, eos_position):
    input_ids = random_ids(PROMPT_LENGTH)
    free_run = generate(model, input_ids, max_new_tokens=NEW_TOKENS)
    distinct = list(dict.fromkeys(free_run[0, PROMPT_LENGTH:].tolist()))
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": distinct[eos_position], **ALL_OUTPUTS}
    plain = generate(model, input_ids, **settings)
    tree = generate(model, input_ids, assistant_model=scripted(free_run, 1.0), tree_budget=30, **settings)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    for name in ["scores", "logits", "hidden_states"]:
        assert len(tree[name]) == len(plain[name])
    assert_close(tree.hidden_states[-1][-1], plain.hidden_states[-1][-1])


def test_only_what_was_asked_for_is_returned(model):
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": 4, "tree_budget": 4}
    sequence = generate(model, input_ids, output_scores=True, output_logits=True, **settings)
    assert type(sequence) is torch.Tensor
    output = generate(model, input_ids, return_dict_in_generate=True, **settings)
    assert isinstance(output, hf_ddtree.GenerateDDTreeOutput)
    assert output.scores is output.logits is output.hidden_states is output.attentions is None
    assert all(r.tree is r.path is r.seconds is None for r in output.rounds)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("budget", [1, 5, 32])
def test_the_rounds_add_up(model, drafter, budget):
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    plain = generate(model, input_ids, **settings)
    arguments = tree_arguments(drafter, model, plain.sequences) | {"tree_budget": budget}
    output = generate(model, input_ids, tree_trace=True, **settings, **arguments)
    emitted = 1  # the prefill's
    new_tokens = output.sequences[0, PROMPT_LENGTH:].tolist()
    for r in output.rounds:
        assert 0 <= r.accepted_length <= r.tree_size <= budget
        assert len(r.tree) == r.tree_size + 1 and len(r.path) == r.accepted_length + 1
        # the path starts at the root and carries the tokens that were emitted
        assert r.path[0] == 0 and r.tree.parents[r.path[1:]].tolist() == r.path[:-1]
        assert r.tree.token_ids[r.path].tolist() == new_tokens[emitted - 1 : emitted + r.accepted_length]
        emitted += r.accepted_length + 1
    assert emitted == NEW_TOKENS
    assert output.tokens_per_round == pytest.approx((NEW_TOKENS - 1) / len(output.rounds))


def test_one_target_forward_per_round(model):
    """Counted on the model: a round that runs the target twice would be slow without being wrong."""
    input_ids = random_ids(PROMPT_LENGTH)
    script = generate(model, input_ids, max_new_tokens=NEW_TOKENS)
    generate(model, input_ids, max_new_tokens=2, tree_budget=2)  # the check of the model is over after this
    forwards = []
    handle = model.register_forward_hook(lambda module, args, outputs: forwards.append(outputs.logits.shape[1]))
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    output = generate(model, input_ids, **settings, **tree_arguments("scripted", model, script))
    handle.remove()
    assert forwards == [1] + [r.tree_size + 1 for r in output.rounds]
    assert output.tokens_per_round > 1.5


def test_no_rounds_have_no_mean(model):
    output = generate(
        model, random_ids(PROMPT_LENGTH), max_new_tokens=1, tree_budget=4, return_dict_in_generate=True
    )
    assert output.rounds == [] and math.isnan(output.tokens_per_round)


def test_timing_has_every_stage_of_every_round(model):
    output = generate(
        model,
        random_ids(PROMPT_LENGTH),
        max_new_tokens=6,
        tree_budget=4,
        tree_timing=True,
        return_dict_in_generate=True,
    )
    for r in output.rounds:
        assert list(r.seconds) == ["draft", "verify", "walk", "commit"]
        assert all(seconds > 0 for seconds in r.seconds.values())
        assert r.tree is r.path is None
    # each round has its own
    assert len({id(r.seconds) for r in output.rounds}) == len(output.rounds)


def test_text_streamer_prints_the_same(model, capsys):
    tokenizer, input_ids = char_tokenizer(), random_ids(PROMPT_LENGTH)
    script = generate(model, input_ids, max_new_tokens=NEW_TOKENS)
    printed = []
    for arguments in [{}, tree_arguments("scripted", model, script)]:
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        generate(model, input_ids, max_new_tokens=NEW_TOKENS, streamer=streamer, **arguments)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > NEW_TOKENS


def test_text_iterator_streamer_yields_the_same_pieces(model):
    tokenizer, input_ids = char_tokenizer(), random_ids(PROMPT_LENGTH)
    script = generate(model, input_ids, max_new_tokens=NEW_TOKENS)
    pieces = []
    for arguments in [{}, tree_arguments("scripted", model, script)]:
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        settings = {"max_new_tokens": NEW_TOKENS, "streamer": streamer, **arguments}
        thread = Thread(target=generate, args=(model, input_ids), kwargs=settings)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1] and len("".join(pieces[0])) > NEW_TOKENS


def assert_tree_equals_plain(model, drafter: str, *inputs, **settings):
    """Sequences and scores; the script of the scripted drafter is the output without padding, as drafters see it."""
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
        assert tree.tokens_per_round > 1.5, "the drafter was fed something else than the sequence"


def embeds_of(model, length: int, seed: int = 0) -> torch.Tensor:
    return model.get_input_embeddings()(random_ids(length, seed)).detach()


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_a_prompt_of_embeddings(model, drafter):
    """Without ids: a text drafter sees the generated tokens only, a DFlash drafter sees all hidden states."""
    assert_tree_equals_plain(model, drafter, inputs_embeds=embeds_of(model, PROMPT_LENGTH))


def test_a_prompt_of_embeddings_with_a_causal_lm_drafter_that_cannot_see_it(model):
    inputs = {"inputs_embeds": embeds_of(model, PROMPT_LENGTH), "max_new_tokens": NEW_TOKENS}
    plain, tree = (generate(model, None, **inputs, **more) for more in ({}, tree_arguments("causal-lm", model, None)))
    assert tree.tolist() == plain.tolist()


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_a_left_padded_prompt_of_embeddings(model, drafter):
    mask = torch.tensor([[0] * 4 + [1] * PROMPT_LENGTH])
    assert_tree_equals_plain(model, drafter, inputs_embeds=embeds_of(model, PROMPT_LENGTH + 4), attention_mask=mask)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ids_together_with_embeddings(model, drafter):
    """The embeddings run, the ids are what processors and drafters see."""
    ids = random_ids(PROMPT_LENGTH)
    assert_tree_equals_plain(model, drafter, ids, inputs_embeds=model.get_input_embeddings()(ids).detach())


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_a_left_padded_prompt(family, padding, drafter):
    """Rows of padding stay hidden from every node, also where the window has passed them."""
    model = hf_ddtree.enable(tiny_model(family))
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(PROMPT_LENGTH)], dim=1)
    assert_tree_equals_plain(model, drafter, ids, attention_mask=(torch.arange(ids.shape[1]) >= padding).long()[None])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_padding_leaves_the_output_of_the_prompt_alone(model, drafter):
    """Against the prompt without padding, which plain generate's own handling of padding cannot influence."""
    ids = random_ids(PROMPT_LENGTH)
    expected = generate(model, ids, max_new_tokens=NEW_TOKENS)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * PROMPT_LENGTH])
    arguments = tree_arguments(drafter, model, expected)
    tree = generate(model, padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, **arguments)
    assert tree[:, 3:].tolist() == expected.tolist()


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "look-up"])
def test_an_attention_mask_with_a_hole(model, drafter):
    """transformers itself makes one where the prompt contains the padding token."""
    mask = torch.ones(1, PROMPT_LENGTH, dtype=torch.long)
    mask[0, 4:6] = 0
    assert_tree_equals_plain(model, drafter, random_ids(PROMPT_LENGTH), attention_mask=mask)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk_size", [1, 5, PROMPT_LENGTH, 100])
def test_prefill_in_chunks(model, drafter, chunk_size):
    assert_tree_equals_plain(model, drafter, random_ids(PROMPT_LENGTH), prefill_chunk_size=chunk_size)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prefill_in_chunks_of_a_padded_prompt_past_the_window(family, drafter):
    model = hf_ddtree.enable(tiny_model(family))
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), random_ids(WINDOW + 6)], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 3).long()[None]
    assert_tree_equals_plain(model, drafter, ids, attention_mask=mask, prefill_chunk_size=4)


def test_a_dflash_drafter_gets_the_same_context_from_chunks(model):
    """All hidden states of the prompt reach the drafter, not only the last chunk's: the trees are the same."""
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
def test_position_ids_of_ones_own(model, drafter, first):
    """Positions that start elsewhere, and one that jumps: the tree goes on from the last one given."""
    positions = torch.arange(first, first + PROMPT_LENGTH)[None]
    positions[:, 6:] += 2
    settings = {"max_new_tokens": NEW_TOKENS, "position_ids": positions}
    plain = generate(model, random_ids(PROMPT_LENGTH), **settings)
    tree = generate(model, random_ids(PROMPT_LENGTH), **settings, **tree_arguments(drafter, model, plain))
    assert tree.tolist() == plain.tolist()
    without = generate(model, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS)
    assert plain.tolist() != without.tolist()  # the positions mattered


def test_a_prompt_of_one_token(model):
    for drafter in DRAFTERS:
        assert_tree_equals_plain(model, drafter, random_ids(1))


def test_no_prompt_but_the_bos_token(model):
    plain = generate(model, None, max_new_tokens=NEW_TOKENS)
    tree = generate(model, None, max_new_tokens=NEW_TOKENS, **tree_arguments("scripted", model, plain))
    assert tree.tolist() == plain.tolist()
