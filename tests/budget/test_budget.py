"""The cost-aware budget: what it selects and when it pauses."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_ddtree import POLICIES, DraftTree, Randomness, TreeConfig, build_tree
from hf_ddtree.budget.budget import MAX_PAUSE, Budget, CostAwareBudget, make_budget
from hf_ddtree.budget.cost import VerifyCost
from hf_ddtree.budget.history import AcceptanceByEstimate, History
from hf_ddtree.enable import resolve_request
from hf_ddtree.target.target import Target
from hf_ddtree.testing import ScriptedDrafter, tiny_dflash_drafter, tiny_model

FLAT = VerifyCost([1, 100], [1, 2], [[1.0, 1.0], [1.0, 1.0]])  # nodes are free
STEEP = VerifyCost([1, 2, 100], [1, 2], [[1.0, 1.5, 60.0]] * 2)  # each node costs half a token


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still until a test moves it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def auto(cost: VerifyCost = FLAT, history: History | None = None) -> CostAwareBudget:
    return CostAwareBudget(cost, 1, history or History())


def drafted(seed: int, n: int = 20) -> DraftTree:
    logits = 3 * torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
    return build_tree(logits, n)


def select(budget: Budget, tree: DraftTree) -> DraftTree:
    """Return what a budget selects in a round that drafted a tree."""
    assert budget.begin_round(max_depth=9) > 0
    [selected] = budget.select_nodes([tree])
    return selected


def test_budget_gives_every_round_the_same_number():
    budget, tree = Budget(7), drafted(0)
    assert budget.limit == budget.begin_round(max_depth=1) == 7
    assert select(budget, tree) is tree and budget.drafted_paths([[0, 2]]) == [[0, 2]]


@pytest.mark.parametrize("budget", [Budget(7), auto()], ids=["fixed", "auto"])
def test_begin_round_drafts_nothing_where_no_node_is_of_use(budget):
    assert budget.begin_round(max_depth=0) == 0 and budget.begin_round(max_depth=1) > 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), slope=st.floats(0.001, 0.5), draft=st.floats(0.01, 2))
def test_select_nodes_takes_the_number_with_the_best_rate(seed, slope, draft):
    tree = drafted(seed)
    budget = auto(VerifyCost([1, 101], [1, 2], [[1.0, 1.0 + 100 * slope]] * 2))
    budget.history.draft_seconds.update(draft)
    selected = select(budget, tree)
    gains = np.sort(AcceptanceByEstimate().expected(tree.log_reach[1:].double().numpy()))[::-1]
    rates = [(1 + gains[:n].sum()) / (draft + 1 + slope * n) for n in range(len(tree))]
    assert rates[len(selected) - 1] == pytest.approx(max(rates))


def test_select_nodes_takes_the_nodes_that_are_most_probably_reached():
    tree = drafted(1)
    selected = select(auto(STEEP), tree)
    assert 1 < len(selected) < len(tree)
    assert float(selected.log_reach.min()) >= float(tree.log_reach.sort(descending=True).values[len(selected) - 1])


def test_select_nodes_takes_all_free_nodes_and_raises_the_limit():
    budget, tree = auto(), drafted(2, n=32)
    assert len(select(budget, tree)) == len(tree)
    assert budget.limit == 64


def test_select_nodes_keeps_a_tree_without_estimates_whole():
    tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    budget = auto(STEEP)
    assert select(budget, tree) is tree and budget.drafted_paths([[0, 2]]) == [[0, 2]]


def test_select_nodes_depends_on_no_drawn_token():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    policy, acceptance = POLICIES["hybrid"], [0.5] * 4
    cost = VerifyCost([1, 2, 100], [1, 2], [[1.0, 1.15, 15.9]] * 2)
    trees = [build_tree(logits, 20, 0, policy, acceptance, Randomness(seed)) for seed in range(5)]
    selected = [select(auto(cost), tree) for tree in trees]
    assert 2 < len(selected[0]) < len(trees[0])
    assert len({tuple(tree.token_ids.tolist()) for tree in selected}) > 1
    assert len({tuple(tree.parents.tolist()) for tree in selected}) == 1


def test_select_nodes_does_not_depend_on_how_long_this_draft_took(clock):
    """Drawing takes longer for some tokens than for others."""
    sizes = set()
    for seconds in (1e-5, 0.1, 10.0):
        budget = auto(STEEP)
        budget.begin_round(max_depth=9)
        clock[0] += seconds
        sizes.add(len(budget.select_nodes([drafted(1)])[0]))
        assert budget.history.draft_seconds.value == pytest.approx(seconds)
    assert len(sizes) == 1


def test_drafted_paths_counts_nodes_as_the_drafter_does():
    tree, budget = drafted(1), auto(STEEP)
    selected = select(budget, tree)
    path = selected.path_to(len(selected) - 1)
    [translated] = budget.drafted_paths([path])
    assert tree.token_ids[translated].tolist() == selected.token_ids[path].tolist()
    assert translated == tree.path_to(translated[-1]) and len(path) > 1
    [nodes] = budget.drafted_paths([list(range(len(selected)))])
    assert tree.log_reach[nodes].tolist() == selected.log_reach.tolist()


def play(budget, clock, accepts: bool, rounds: int, cost: float = 0.5, log_reach=(0.0, -0.1, -0.2)) -> list[bool]:
    """Play rounds with a drafter of two tokens that are all accepted or never. Return which rounds drafted."""
    history = []
    for _ in range(rounds):
        drafts, tree = budget.begin_round(max_depth=9) > 0, DraftTree.chain([1])
        if drafts:
            clock[0] += cost
            tree = DraftTree.from_lists([1, 2, 3], [-1, 0, 1], log_reach=list(log_reach))
        [tree] = budget.select_nodes([tree])
        clock[0] += 1.0
        budget.end_round([list(range(len(tree))) if accepts else [0]])
        history.append(drafts)
    return history


def test_end_round_pauses_ever_longer_where_drafting_does_not_pay(clock):
    history = play(auto(), clock, accepts=False, rounds=400)
    attempts = [i for i, drafts in enumerate(history) if drafts]
    gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(attempts)]
    assert gaps[:4] == [0] * 4, "some rounds may be unlucky"
    assert gaps[4:] == [1, 2, 4, 8, 16, 32, *[MAX_PAUSE] * (len(gaps) - 10)] and len(gaps) > 12


def test_end_round_pauses_at_once_where_no_node_is_worth_verifying(clock):
    history = play(auto(STEEP), clock, accepts=False, rounds=8, log_reach=[0.0, -9.0, -18.0])
    assert history == [True, False, True, False, False, True, False, False]


def test_begin_round_drafts_on_where_drafting_pays_and_again_when_it_does(clock):
    budget = auto()
    assert all(play(budget, clock, accepts=True, rounds=20))
    play(budget, clock, accepts=False, rounds=60)
    later = play(budget, clock, accepts=True, rounds=120)
    assert not all(later) and all(later[-20:])


def test_begin_round_of_the_next_request_tries_once_and_then_pauses_for_as_long_as_before(clock):
    history = History()
    play(auto(history=history), clock, accepts=False, rounds=40)
    assert history.pause == 32
    drafts = play(auto(history=history), clock, accepts=False, rounds=40)
    assert [i for i, drafts_now in enumerate(drafts) if drafts_now] == [0, 33]


def test_begin_round_drafts_for_a_text_where_it_pays_whatever_came_before(clock):
    history = History()
    for _ in range(20):
        play(auto(history=history), clock, accepts=False, rounds=40)
    assert sum(play(auto(history=history), clock, accepts=True, rounds=20)) >= 18


def test_begin_round_gives_up_on_a_text_where_drafting_does_not_pay_whatever_came_before(clock):
    history = History()
    for _ in range(20):
        play(auto(history=history), clock, accepts=True, rounds=40)
    assert sum(play(auto(history=history), clock, accepts=False, rounds=40)) <= 20


def test_end_round_does_not_pause_where_looking_in_vain_costs_nothing(clock):
    """Prompt look-up finds nothing before the text repeats something."""
    budget = auto()
    for _ in range(20):
        assert budget.begin_round(max_depth=9) > 0
        clock[0] += 1e-4
        budget.select_nodes([DraftTree.from_lists([1], [-1], log_reach=[0.0])])
        clock[0] += 1.0
        budget.end_round([[0]])


def test_end_round_scales_the_costs_by_the_clock(clock):
    """On a machine that verifies four times more slowly than measured, drafting is worth more."""
    budget = auto(STEEP)
    for _ in range(30):
        budget.begin_round(max_depth=9)
        budget.select_nodes([DraftTree.chain([1])])
        clock[0] += 4.0
        budget.end_round([[0]])
    assert budget.history.scale.value == pytest.approx(4, rel=0.05)


def test_begin_round_starts_the_clock_after_the_prefill(clock):
    budget = auto()
    clock[0] += 100.0
    budget.begin_round(max_depth=9)
    budget.select_nodes([DraftTree.chain([1])])
    clock[0] += 2.0
    budget.end_round([[0]])
    assert budget.history.scale.value == pytest.approx(2)


def request_budget(model, drafter, tree_budget: int | str = "auto", **settings) -> Budget:
    target = Target(model, {"position_ids": torch.zeros(1, 1, dtype=torch.long)})
    request = resolve_request(TreeConfig(tree_budget), GenerationConfig(**settings))
    return make_budget(request, target, drafter, length=3)


@pytest.fixture
def flat_cost(monkeypatch):
    """Use a cost that nobody measured, and return the arguments with which it was asked for."""
    calls = []
    monkeypatch.setattr("hf_ddtree.budget.budget.verify_cost", lambda *args: calls.append(args) or FLAT)
    return calls


def test_make_budget_of_a_number_measures_nothing(flat_cost):
    budget = request_budget(tiny_model("llama"), None, tree_budget=5)
    assert type(budget) is Budget and budget.limit == 5 and not flat_cost


def test_make_budget_remembers_one_drafter_for_one_target_at_one_temperature(flat_cost):
    model, other = tiny_model("llama"), tiny_model("llama")
    drafter, second = tiny_dflash_drafter(model), tiny_dflash_drafter(model)
    sampled, greedy = {"do_sample": True, "temperature": 0.7}, {"do_sample": False}
    histories = [request_budget(model, drafter, **sampled).history, request_budget(model, drafter, **greedy).history]
    histories += [request_budget(other, drafter, **sampled).history, request_budget(model, second, **sampled).history]
    assert len(set(map(id, histories))) == 4
    assert request_budget(model, drafter, **sampled).history is histories[0]
    assert request_budget(model, drafter, do_sample=False, temperature=0.7).history is histories[1]
    assert [args[0] for args in flat_cost[:4]] == [model, model, other, model]


@pytest.mark.parametrize("drafter", [None, ScriptedDrafter([5])], ids=["look-up", "of one's own"])
def test_make_budget_remembers_nothing_of_what_drafts_anew_for_every_request(flat_cost, drafter):
    model = tiny_model("llama")
    assert request_budget(model, drafter).history is not request_budget(model, drafter).history
