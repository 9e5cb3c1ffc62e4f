"""What `generate` returns beside the tokens: scores, logits and hidden states as plain `generate`, and the rounds."""

import math

import pytest
import torch
from helpers import assert_close, generate, random_ids, scripted, tree_arguments

import hf_ddtree
from hf_ddtree import DraftTree, GenerateDDTreeOutput, Round
from hf_ddtree.testing import tiny_model

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


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("decoding", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
def test_output_scores_logits_and_hidden_states_equal_plain_generates(model, drafter, decoding):
    """There is one entry per emitted token. The processors make scores and logits differ from each other."""
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.3, **ALL_OUTPUTS, **decoding}
    plain = generate(model, input_ids, **settings)
    tree = generate(model, input_ids, **settings, **tree_arguments(drafter, model, plain.sequences))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert tree.attentions is plain.attentions is None
    for name in ["scores", "logits"]:
        assert len(tree[name]) == len(plain[name]) == NEW_TOKENS
        for actual, expected in zip(tree[name], plain[name], strict=True):
            assert_close(actual, expected)
    assert len(tree.hidden_states) == len(plain.hidden_states) == NEW_TOKENS
    for step, expected_step in zip(tree.hidden_states, plain.hidden_states, strict=True):
        assert len(step) == len(expected_step) == model.config.num_hidden_layers + 1
        for actual, expected in zip(step, expected_step, strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("eos_position", [0, 3, 7])
def test_output_ends_with_the_last_token_when_eos_falls_inside_a_path(model, eos_position):
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


def test_output_holds_only_what_was_asked_for(model):
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": 4, "tree_budget": 4}
    sequence = generate(model, input_ids, output_scores=True, output_logits=True, **settings)
    assert type(sequence) is torch.Tensor
    output = generate(model, input_ids, return_dict_in_generate=True, **settings)
    assert isinstance(output, GenerateDDTreeOutput)
    assert output.scores is output.logits is output.hidden_states is output.attentions is None
    assert all(r.tree is r.path is r.seconds is None for r in output.rounds)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("budget", [1, 5, 32])
def test_output_rounds_add_up(model, drafter, budget):
    input_ids = random_ids(PROMPT_LENGTH)
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    plain = generate(model, input_ids, **settings)
    arguments = tree_arguments(drafter, model, plain.sequences) | {"tree_budget": budget}
    output = generate(model, input_ids, tree_trace=True, **settings, **arguments)
    emitted = 1  # by the prefill
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


def test_tokens_per_round_counts_the_bonus_token():
    rounds = [Round(tree_size=8, accepted_length=n) for n in (3, 0)]
    assert GenerateDDTreeOutput(sequences=torch.zeros(1, 1), rounds=rounds).tokens_per_round == 2.5


def test_tokens_per_round_without_rounds_is_nan(model):
    prompt = random_ids(PROMPT_LENGTH)
    output = generate(model, prompt, max_new_tokens=1, tree_budget=4, return_dict_in_generate=True)
    assert output.rounds == [] and math.isnan(output.tokens_per_round)


def test_timing_covers_every_stage_of_every_round(model):
    settings = {"max_new_tokens": 6, "tree_budget": 4, "return_dict_in_generate": True}
    output = generate(model, random_ids(PROMPT_LENGTH), tree_timing=True, **settings)
    for r in output.rounds:
        assert list(r.seconds) == ["draft", "verify", "walk", "commit"]
        assert all(seconds > 0 for seconds in r.seconds.values())
        assert r.tree is r.path is None
    # each round has its own
    assert len({id(r.seconds) for r in output.rounds}) == len(output.rounds)


def test_trace_keeps_no_proposals(model):
    """Each proposal holds a distribution over the vocabulary."""
    arguments = tree_arguments("dflash", model, None) | {"tree_sampling": "swor"}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "return_dict_in_generate": True}
    output = generate(model, random_ids(PROMPT_LENGTH), tree_trace=True, **settings, **arguments)
    trees = [r.tree for r in output.rounds]
    assert trees and all(isinstance(tree, DraftTree) and tree.proposals == {} for tree in trees)
