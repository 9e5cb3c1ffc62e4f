"""Held-out acceptance as a look-up in known answers."""

import pytest
import torch
from helpers import generate, random_ids

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.acceptance import CHAIN, accepted_length, held_out_tokens_per_round, tree_of_budget
from hf_ddtree.training.data import Sequence

DRAFT_LOGITS = torch.tensor([[2.0, 1.0, -9.0], [0.0, 3.0, -9.0]])


@pytest.mark.parametrize(
    ("budget", "answer", "expected"), [(CHAIN, [0, 1], 2), (CHAIN, [1, 1], 0), (4, [1, 1], 2), (4, [2, 1], 0)]
)
def test_accepted_length_follows_the_answer_through_the_tree(budget, answer, expected):
    assert accepted_length(tree_of_budget(DRAFT_LOGITS, budget), answer) == expected


def test_accepted_length_ends_with_the_answer():
    assert accepted_length(tree_of_budget(DRAFT_LOGITS, CHAIN), [0]) == 1
    assert accepted_length(tree_of_budget(DRAFT_LOGITS, CHAIN), []) == 0


def test_held_out_tokens_per_round_equals_generation():
    """The same number of tokens and rounds as `generate` needs for the same greedy answers."""
    target = tiny_model("llama", initializer_range=0.15)
    drafter = tiny_dflash_drafter(target)
    sequences, rounds, tokens = [], 0, 0
    for seed in range(3):
        prompt = random_ids(6, seed)
        answer = generate(target, prompt, max_new_tokens=20, do_sample=False)
        sequences.append(Sequence(answer[0], prompt.shape[1], 0.0))
        hf_ddtree.enable(target)
        output = generate(
            target,
            prompt,
            max_new_tokens=20,
            do_sample=False,
            assistant_model=drafter,
            tree_budget=8,
            return_dict_in_generate=True,
        )
        hf_ddtree.disable(target)
        assert torch.equal(output.sequences, answer)
        rounds += len(output.rounds)
        tokens += sum(r.accepted_length + 1 for r in output.rounds)
    figures = held_out_tokens_per_round(drafter, target, sequences, (CHAIN, 8))
    assert figures[8] == pytest.approx(tokens / rounds) and figures[8] >= figures[CHAIN] >= 1


def test_held_out_tokens_per_round_skips_answers_without_a_round():
    target = tiny_model("llama")
    sequences = [Sequence(random_ids(6)[0], 5, 0.0)]
    assert held_out_tokens_per_round(tiny_dflash_drafter(target), target, sequences, (8,)) == {8: 0.0}
