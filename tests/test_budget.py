"""The cost-aware budget: what it chooses, when it pauses, and that the text stays what it was."""

import copy
import gc
import itertools
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.budget import MOST_SKIPPED, Average, Budget, Calibration, CostAwareBudget, Experience, make_budget
from hf_ddtree.cost import VerifyCost
from hf_ddtree.drafters import DFlashTreeGenerator, TreeCandidateGenerator
from hf_ddtree.randomness import Randomness
from hf_ddtree.testing import VOCAB_SIZE, ScriptedDrafter, tiny_dflash_drafter, tiny_model, truncated_copy
from hf_ddtree.tree import POLICIES, build_tree

FLAT = VerifyCost([1, 100], [1, 2], [[1.0, 1.0], [1.0, 1.0]])  # nodes are free
STEEP = VerifyCost([1, 2, 100], [1, 2], [[1.0, 1.5, 60.0]] * 2)  # each costs half a token


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What is measured here stays here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def drafted(seed: int, n: int = 20) -> DraftTree:
    logits = 3 * torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
    return build_tree(logits, n)


def test_a_number_is_what_every_round_gets():
    budget, tree = Budget(7), drafted(0)
    assert budget.limit == 7 and budget.drafts(max_depth=1) and budget.trim(tree, 1.0) is tree


@pytest.mark.parametrize("budget", [Budget(7), CostAwareBudget(FLAT, 1, Experience())], ids=["fixed", "auto"])
def test_nothing_is_drafted_where_no_node_is_of_use(budget):
    assert not budget.drafts(max_depth=0) and budget.drafts(max_depth=1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), slope=st.floats(0.001, 0.5), draft=st.floats(0.01, 2))
def test_no_other_number_of_nodes_has_a_better_rate(seed, slope, draft):
    tree = drafted(seed)
    cost = VerifyCost([1, 101], [1, 2], [[1.0, 1.0 + 100 * slope]] * 2)
    budget = CostAwareBudget(cost, 1, Experience())
    budget.experience.draft_seconds.add(draft)
    kept = budget.trim(tree, draft)
    gains = np.sort(Calibration().expected(tree.log_reach[1:].double().numpy()))[::-1]
    rates = [(1 + gains[:n].sum()) / (draft + 1 + slope * n) for n in range(len(tree))]
    assert rates[len(kept) - 1] == pytest.approx(max(rates))


def test_what_is_kept_are_the_nodes_most_probably_reached():
    tree = drafted(1)
    kept = CostAwareBudget(STEEP, 1, Experience()).trim(tree, 3.0)
    assert 1 < len(kept) < len(tree)
    assert float(kept.log_reach.min()) >= float(tree.log_reach.sort(descending=True).values[len(kept) - 1])


def test_free_nodes_are_all_kept_and_the_limit_grows():
    budget = CostAwareBudget(FLAT, 1, Experience())
    tree = drafted(2, n=32)
    assert len(budget.trim(tree, 0.1)) == len(tree)
    assert budget.limit == 64


def test_a_tree_without_estimates_stays_whole():
    tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    assert CostAwareBudget(STEEP, 1, Experience()).trim(tree, 0.1) is tree


def test_the_same_number_depends_on_no_drawn_token():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    policy, acceptance = POLICIES["hybrid"], [0.5] * 4
    cost = VerifyCost([1, 2, 100], [1, 2], [[1.0, 1.15, 15.9]] * 2)
    trees = [build_tree(logits, 20, 0, policy, acceptance, Randomness(seed)) for seed in range(5)]
    kept = [CostAwareBudget(cost, 1, Experience()).trim(tree, 3.0) for tree in trees]
    assert 2 < len(kept[0]) < len(trees[0])
    assert len({tuple(tree.token_ids.tolist()) for tree in kept}) > 1
    assert len({tuple(tree.parents.tolist()) for tree in kept}) == 1


def test_it_does_not_depend_on_how_long_this_draft_took():
    """Drawing some tokens takes longer than drawing others."""
    sizes = {len(CostAwareBudget(STEEP, 1, Experience()).trim(drafted(1), seconds)) for seconds in (1e-5, 0.1, 10.0)}
    assert len(sizes) == 1


class Scattered(TreeCandidateGenerator):
    """The right tokens behind decoys: what is kept of the tree has other indices than the tree."""

    def __init__(self, script: list[int]):
        self.script, self.tree, self.accepted = script, None, []

    def get_candidates(self, input_ids, tree_budget, max_depth):
        right = self.script[input_ids.shape[1] :][: min(3, max_depth)]
        decoys, first = 6, 7
        parents = [-1, *[0] * decoys, 0, *range(first, first + len(right) - 1)][: 1 + decoys + len(right)]
        log_reach = [0.0, *[-12.0] * decoys, *(-0.01 * depth for depth in range(1, len(right) + 1))]
        tokens = [int(input_ids[0, -1]), *range(decoys), *right]
        self.tree = DraftTree.from_lists(tokens, parents, log_reach=log_reach)
        return self.tree

    def commit_path(self, path, hidden_states):
        self.accepted += [] if path == [0] else self.tree.token_ids[path[1:]].tolist()


def test_drafters_hear_of_nodes_as_they_counted_them(monkeypatch):
    monkeypatch.setattr("hf_ddtree.budget.verify_cost", lambda *_: STEEP)
    model = hf_ddtree.enable(tiny_model("llama"))
    prompt = torch.tensor([[5, 6, 7]])
    plain = model.generate(prompt, max_new_tokens=30, do_sample=False)
    drafter = Scattered(plain[0].tolist())
    options = {"tree_budget": "auto", "return_dict_in_generate": True, "tree_trace": True}
    output = model.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drafter, **options)
    assert torch.equal(output.sequences, plain)
    kept = [r.tree.token_ids[r.path[1:]].tolist() for r in output.rounds[:-1]]
    assert any(kept) and sum(kept, []) == drafter.accepted[: len(sum(kept, []))]
    assert any(r.tree_size < 6 for r in output.rounds if r.accepted_length)


def play(budget, clock, accepts: bool, rounds: int, cost: float = 0.5, log_reach=(0.0, -0.1, -0.2)) -> list[bool]:
    """Rounds with a drafter of two tokens that are all accepted or never; returns which rounds drafted."""
    history = []
    for _ in range(rounds):
        drafts = budget.drafts(max_depth=9)
        tree = DraftTree.from_lists([1], [-1])
        if drafts:
            clock[0] += cost
            chain = DraftTree.from_lists([1, 2, 3], [-1, 0, 1], log_reach=list(log_reach))
            tree = budget.trim(chain, cost)
        clock[0] += 1.0
        budget.observe(tree, list(range(len(tree))) if accepts else [0])
        history.append(drafts)
    return history


def test_it_pauses_ever_longer_where_drafting_does_not_pay(clock):
    history = play(CostAwareBudget(FLAT, 1, Experience()), clock, accepts=False, rounds=400)
    attempts = [i for i, drafts in enumerate(history) if drafts]
    gaps = [later - earlier - 1 for earlier, later in zip(attempts, attempts[1:])]
    assert gaps[:4] == [0] * 4, "some rounds may be unlucky"
    assert gaps[4:] == [1, 2, 4, 8, 16, 32, *[MOST_SKIPPED] * (len(gaps) - 10)] and len(gaps) > 12


def test_it_pauses_at_once_where_the_draft_itself_is_hopeless(clock):
    budget = CostAwareBudget(STEEP, 1, Experience())
    history = play(budget, clock, accepts=False, rounds=8, log_reach=[0.0, -9.0, -18.0])
    assert history == [True, False, True, False, False, True, False, False]


def test_it_drafts_on_where_it_pays_and_again_when_it_does(clock):
    budget = CostAwareBudget(FLAT, 1, Experience())
    assert all(play(budget, clock, accepts=True, rounds=20))
    play(budget, clock, accepts=False, rounds=60)
    later = play(budget, clock, accepts=True, rounds=120)
    assert not all(later) and all(later[-20:])


def test_the_next_request_tries_once_and_pauses_as_long_as_the_last_one_would_have(clock):
    experience = Experience()
    play(CostAwareBudget(FLAT, 1, experience), clock, accepts=False, rounds=40)
    assert experience.pause == 32
    history = play(CostAwareBudget(FLAT, 1, experience), clock, accepts=False, rounds=40)
    assert [i for i, drafts in enumerate(history) if drafts] == [0, 33]


def test_a_text_where_drafting_pays_is_drafted_whatever_came_before(clock):
    experience = Experience()
    for _ in range(20):
        play(CostAwareBudget(FLAT, 1, experience), clock, accepts=False, rounds=40)
    history = play(CostAwareBudget(FLAT, 1, experience), clock, accepts=True, rounds=20)
    assert sum(history) >= 18


def test_a_text_where_drafting_does_not_pay_is_given_up_whatever_came_before(clock):
    experience = Experience()
    for _ in range(20):
        play(CostAwareBudget(FLAT, 1, experience), clock, accepts=True, rounds=40)
    history = play(CostAwareBudget(FLAT, 1, experience), clock, accepts=False, rounds=40)
    assert sum(history) <= 20


def remembered(model, drafter, **settings) -> Experience:
    settings = GenerationConfig(**settings)
    return make_budget("auto", model, drafter, settings, torch.tensor([[5]]), False).experience


def test_what_was_learned_is_that_of_one_drafter_for_one_target_at_one_temperature(monkeypatch):
    monkeypatch.setattr("hf_ddtree.budget.verify_cost", lambda *_: FLAT)
    model, other = tiny_model("llama"), tiny_model("llama")
    drafter, sampled = tiny_dflash_drafter(model), {"do_sample": True, "temperature": 0.7}
    known = [remembered(model, drafter, **settings) for settings in (sampled, {"do_sample": False})]
    known += [remembered(other, drafter, **sampled), remembered(model, tiny_dflash_drafter(model), **sampled)]
    assert len(set(map(id, known))) == 4
    assert remembered(model, drafter, **sampled) is known[0]
    assert remembered(model, drafter, do_sample=False, temperature=0.7) is known[1]


@pytest.mark.parametrize("drafter", [None, ScriptedDrafter([5])], ids=["look-up", "of one's own"])
def test_what_drafts_anew_for_every_request_is_judged_anew(monkeypatch, drafter):
    monkeypatch.setattr("hf_ddtree.budget.verify_cost", lambda *_: FLAT)
    model = tiny_model("llama")
    assert remembered(model, drafter) is not remembered(model, drafter)


def test_nothing_is_remembered_of_models_that_are_gone(monkeypatch):
    monkeypatch.setattr("hf_ddtree.budget.verify_cost", lambda *_: FLAT)
    model = tiny_model("llama")
    drafter = tiny_dflash_drafter(model)
    gone = [weakref.ref(remembered(model, drafter)), weakref.ref(model), weakref.ref(drafter)]
    del model, drafter
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_a_useless_drafter_is_used_ever_less(monkeypatch):
    """By `generate` itself: it is sure of a token that never comes."""
    never, ticks = 0, itertools.count()
    monkeypatch.setattr("hf_ddtree.budget.verify_cost", lambda *_: FLAT)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))

    def sure(self, input_ids, *_):
        return DraftTree.from_lists([int(input_ids[0, -1]), never], [-1, 0], log_reach=[0.0, -0.1])

    monkeypatch.setattr(DFlashTreeGenerator, "get_candidates", sure)
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter, drafts = tiny_dflash_drafter(model), []
    for seed in range(4):
        prompt = torch.randint(4, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(seed))
        settings = {"max_new_tokens": 40, "do_sample": False, "suppress_tokens": [never]}
        options = {"tree_budget": "auto", "assistant_model": drafter, "return_dict_in_generate": True}
        output = model.generate(prompt, **settings, **options)
        assert torch.equal(output.sequences, model.generate(prompt, **settings))
        drafts.append(sum(r.tree_size > 0 for r in output.rounds))
    assert drafts[0] > 6 and drafts[-1] == 1


def test_looking_in_vain_at_no_cost_is_no_reason_to_pause(clock):
    """As prompt look-up does before anything repeats."""
    budget = CostAwareBudget(FLAT, 1, Experience())
    for _ in range(20):
        assert budget.drafts(max_depth=9)
        tree = budget.trim(DraftTree.from_lists([1], [-1], log_reach=[0.0]), 1e-4)
        clock[0] += 1.0
        budget.observe(tree, [0])


def test_the_costs_follow_the_clock(clock):
    """A machine that has become four times slower in verifying makes drafting worth more."""
    budget = CostAwareBudget(STEEP, 1, Experience())
    for _ in range(30):
        budget.drafts(max_depth=9)
        clock[0] += 4.0
        budget.observe(DraftTree.from_lists([1], [-1]), [0])
    assert budget.experience.scale.value == pytest.approx(4, rel=0.05)


def test_the_time_of_the_prefill_counts_for_no_round(clock):
    budget = CostAwareBudget(FLAT, 1, Experience())
    clock[0] += 100.0
    budget.drafts(max_depth=9)
    clock[0] += 2.0
    budget.observe(DraftTree.from_lists([1], [-1]), [0])
    assert budget.experience.scale.value == pytest.approx(2)


def test_estimates_are_corrected_by_what_was_accepted():
    calibration, log_reach = Calibration(), np.log([0.9, 0.6, 0.2, 0.001])
    before = calibration.expected(log_reach)
    often = 20  # nodes of each estimate a round, against which the prior weighs little
    for _ in range(400):  # of the first two, a third is accepted; of the third, two thirds, and the last one never
        for hits in ([True, False, False, False], [False, False, True, False], [False, False, True, False]):
            calibration.observe(np.repeat(log_reach, often), np.repeat(hits, often))
    after = calibration.expected(log_reach)
    assert after[0] + after[1] == pytest.approx(1 / 3, rel=0.02) and after[2] == pytest.approx(2 / 3, rel=0.02)
    assert after[3] < before[3]


def test_estimates_of_a_size_not_seen_yet_are_corrected_like_the_others():
    calibration = Calibration()
    unseen = np.log([0.01])
    for _ in range(50):
        calibration.observe(np.log([0.9, 0.8, 0.7]), np.array([False] * 3))
    assert calibration.expected(unseen)[0] < 0.1 * Calibration().expected(unseen)[0]


def test_what_was_seen_long_ago_is_forgotten():
    calibration, log_reach = Calibration(), np.log([0.9, 0.8])
    for hits in ([False] * 2, [True] * 2):
        for _ in range(500):
            calibration.observe(log_reach, np.array(hits))
    assert calibration.expected(log_reach).sum() == pytest.approx(2, rel=0.1)


def test_older_rounds_fade():
    average = Average()
    for value in [1.0] * 50 + [3.0] * 50:
        average.add(value)
    assert average.value == pytest.approx(3, abs=0.01)


DRAFTERS = {
    "look-up": lambda model: None,
    "causal LM": lambda model: truncated_copy(model, 2),
    "DFlash": tiny_dflash_drafter,
    "scripted": lambda model: ScriptedDrafter([5] * 100),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_of_plain_generate(drafter):
    model = hf_ddtree.enable(tiny_model("llama"))
    prompt = torch.randint(4, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(0))
    for sampling in ({"do_sample": False}, {"do_sample": True, "tree_sampling": "target"}):
        texts = []
        for options in ({}, {"tree_budget": "auto", "assistant_model": DRAFTERS[drafter](model)}):
            torch.manual_seed(1)
            own = {name: value for name, value in sampling.items() if options or name != "tree_sampling"}
            texts.append(model.generate(prompt, max_new_tokens=40, **own, **options))
        assert torch.equal(*texts)


@pytest.mark.parametrize("policy", ["hybrid", "swor", "spectr"])
@pytest.mark.parametrize("drafter", ["causal LM", "DFlash"])
def test_every_policy_samples_with_it(policy, drafter):
    model = hf_ddtree.enable(tiny_model("llama"))
    output = model.generate(
        torch.tensor([[5, 6, 7]]),
        assistant_model=DRAFTERS[drafter](model),
        max_new_tokens=30,
        do_sample=True,
        tree_sampling=policy,
        tree_budget="auto",
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == 33
    assert sum(1 + r.accepted_length for r in output.rounds) == 29


def test_rounds_without_a_draft_are_in_the_record(monkeypatch):
    monkeypatch.setattr(CostAwareBudget, "drafts", lambda self, max_depth: False)
    model = hf_ddtree.enable(tiny_model("llama"))
    output = model.generate(
        torch.tensor([[5, 6, 5, 6]]), max_new_tokens=9, tree_budget="auto", return_dict_in_generate=True
    )
    assert [r.tree_size for r in output.rounds] == [0] * 8


def test_tensor_parallel_targets_need_a_number(monkeypatch):
    model = hf_ddtree.enable(copy.deepcopy(tiny_model("llama")))
    model._tp_size = 2
    with pytest.raises(ValueError, match='tree_budget="auto".*number'):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget="auto")


@pytest.mark.parametrize("wrong", ["automatic", "", "8", 0, 2.5])
def test_other_words_are_refused(wrong):
    model = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match="tree_budget=.*auto"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget=wrong)
