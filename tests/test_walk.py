"""The walk: what is emitted, what is accepted, and that sampling follows the target."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_ddtree import DraftTree
from hf_ddtree.enable import resolve_request
from hf_ddtree.request import TreeConfig
from hf_ddtree.tree import Proposal
from hf_ddtree.walk import Emitter, count_padding, walk_tree

V = 6


def emitter(do_sample=False, max_length=100, processors=()) -> Emitter:
    prompt = torch.tensor([[5, 0]])
    stopping = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    return Emitter(prompt, LogitsProcessorList(processors), stopping, do_sample, scores=(), logits=())


def one_hot_logits(choices: list[int]) -> torch.Tensor:
    return 10 * torch.nn.functional.one_hot(torch.tensor([choices]), V).float()


# root 0 -> {1, 2}; node 1 -> {1}; node 2 -> {3}
TREE = DraftTree.from_lists([0, 1, 2, 1, 3], [-1, 0, 0, 1, 2])


@pytest.mark.parametrize(
    "choices, path, emitted",
    [
        pytest.param([4, 0, 0, 0, 0], [0], [4], id="the bonus token leaves the tree at the root"),
        pytest.param([2, 0, 4, 0, 0], [0, 2], [2, 4], id="second sibling"),
        pytest.param([2, 0, 3, 0, 5], [0, 2, 4], [2, 3, 5], id="to a leaf"),
        pytest.param([1, 3, 0, 0, 0], [0, 1], [1, 3], id="a cousin's token is no child"),
    ],
)
def test_walk_tree_descends_while_the_choice_is_a_child(choices, path, emitted):
    sequence = emitter()
    assert walk_tree(TREE, one_hot_logits(choices), sequence) == path
    assert sequence.input_ids[0, 2:].tolist() == emitted
    assert len(sequence.scores) == len(sequence.logits) == len(emitted)


@pytest.mark.parametrize("room, path", [(1, [0]), (2, [0, 2]), (3, [0, 2, 4])])
def test_walk_tree_stops_inside_the_tree(room, path):
    sequence = emitter(max_length=2 + room)
    assert walk_tree(TREE, one_hot_logits([2, 0, 3, 0, 5]), sequence) == path
    assert sequence.finished and sequence.input_ids.shape[1] == 2 + room


def test_walk_tree_shows_processors_the_true_prefix_of_each_emitted_token_once():
    seen = []

    def spy(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    walk_tree(TREE, one_hot_logits([2, 0, 3, 0, 5]), emitter(processors=[spy]))
    assert seen == [[5, 0], [5, 0, 2], [5, 0, 2, 3]]


def test_walk_tree_protects_the_logits_of_the_tree_from_processors():
    def destroy(input_ids, scores):
        return scores.zero_()

    logits = one_hot_logits([2, 0, 3, 0, 5])
    walk_tree(TREE, logits, emitter(processors=[destroy]))
    assert torch.equal(logits, one_hot_logits([2, 0, 3, 0, 5]))


def test_walk_tree_samples_from_the_target_whatever_the_tree():
    """Pearson's chi-squared over the first two tokens of 20,000 walks: 99.9% below 66.6 at 35 degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, len(TREE), V, generator=generator)
    p = logits[0].softmax(-1)
    node_of = {1: 1, 2: 2}
    torch.manual_seed(0)
    counts = torch.zeros(V, V)
    n = 20_000
    for _ in range(n):
        sequence = emitter(do_sample=True)
        path = walk_tree(TREE, logits, sequence)
        first = int(sequence.input_ids[0, 2])
        # If the walk has ended, the next round goes on from the token, here with p of the root.
        second = int(torch.multinomial(p[0], 1)) if len(path) == 1 else int(sequence.input_ids[0, 3])
        counts[first, second] += 1
    expected = torch.stack([n * p[0, token] * p[node_of.get(token, 0)] for token in range(V)])
    assert float(((counts - expected) ** 2 / expected).sum()) < 66.6


def test_emit_keeps_the_depth_and_the_overlap_of_a_proposal():
    sequence = emitter(do_sample=True)
    p = torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
    q = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    torch.manual_seed(0)
    sequence.emit(p.log(), Proposal([1], q, [0], 3, False))
    [(depth, overlap)] = sequence.take_overlaps()
    assert depth == 3 and overlap == pytest.approx(0.2 / 0.5)
    assert sequence.take_overlaps() == []


def test_emit_without_a_proposal_draws_as_plain_sampling_does():
    sequence, logits = emitter(do_sample=True), torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    token = sequence.emit(logits)
    torch.manual_seed(1)
    assert token == int(torch.multinomial(logits.softmax(-1), 1)) and sequence.take_overlaps() == []


@pytest.mark.parametrize(
    "mask, expected",
    [(None, 0), ([[1, 1, 1]], 0), ([[0, 0, 1]], 2), ([[1, 1, 0, 0, 1]], 2)],
    ids=["no mask", "no padding", "padding", "a mask that is longer than the prompt"],
)
def test_count_padding_counts_at_the_left_of_the_prompt(mask, expected):
    mask = None if mask is None else torch.tensor(mask)
    assert count_padding(torch.tensor([[9, 9, 5]]), mask) == expected
    assert count_padding(torch.empty(1, 0, dtype=torch.long), mask) == 0


@pytest.mark.parametrize("kept", [set(), {"scores"}, {"logits"}])
def test_from_request_keeps_what_is_to_be_returned(kept):
    settings = GenerationConfig(
        do_sample=True, return_dict_in_generate=True, output_scores="scores" in kept, output_logits="logits" in kept
    )
    request = resolve_request(TreeConfig(tree_budget=4), settings)
    prompt, mask = torch.tensor([[9, 5, 0]]), torch.tensor([[0, 1, 1]])
    sequence = Emitter.from_request(request, prompt, LogitsProcessorList(), StoppingCriteriaList(), None, mask)
    assert sequence.do_sample and sequence.length == 3 and sequence.sequence.tolist() == [[5, 0]]
    assert sequence.scores == (() if "scores" in kept else None)
    assert sequence.logits == (() if "logits" in kept else None)
