"""The rounds behind the pictures."""

from dataclasses import replace

from demo.support import ask, finish

from hf_ddtree import DraftTree
from hf_ddtree.demo import DRAFTER, DraftedRound, Sampling, drafted_rounds
from hf_ddtree.demo.rounds import telling_round


def test_drafted_rounds_add_up_to_the_text(loaded):
    drafted = finish(loaded, ask(drafter=DRAFTER)).drafted
    tokens = drafted.token_ids[:1]
    for entry in drafted.rounds:
        assert int(entry.tree.token_ids[0]) == tokens[-1]
        tokens += entry.tree.token_ids[entry.path[1:]].tolist()
        tokens += [] if entry.bonus is None else [entry.bonus]
    assert tokens == drafted.token_ids


def test_drafted_rounds_keep_no_distributions(loaded):
    sampling = Sampling(policy="hybrid", temperature=1.0)
    rounds = finish(loaded, ask(drafter=DRAFTER, sampling=sampling)).drafted.rounds
    assert rounds and not any(entry.tree.proposals for entry in rounds)


def test_drafted_rounds_is_none_without_a_trace(loaded):
    form = ask(drafter=DRAFTER)
    inputs, options = form.inputs(loaded), {**form.settings(), **form.tree_options(loaded), "tree_trace": False}
    assert drafted_rounds(loaded.model.generate(**inputs, **form.settings()), 15) is None
    assert drafted_rounds(loaded.model.generate(**inputs, **options), 15) is None


def test_telling_round_prefers_rounds_that_rejected_nodes():
    chain = DraftedRound(DraftTree.from_lists([1, 2, 3], [-1, 0, 1]), [0, 1, 2], None)
    fork = DraftedRound(DraftTree.from_lists([1, 2, 3], [-1, 0, 0]), [0, 1], None)
    rejected = DraftedRound(fork.tree, [0], None)
    assert telling_round([chain, rejected, fork, rejected]) == 3
    assert telling_round([replace(chain, path=[0, 1, 2]), chain]) == 1
