"""`tree_budget="auto"` through `generate`: the text, the drafter's view, and ever fewer useless drafts."""

import copy
import itertools
import time

import pytest
import torch
from helpers import generate, random_ids

import hf_ddtree
from hf_ddtree import Drafter, DraftTree
from hf_ddtree.budget.budget import CostAwareBudget
from hf_ddtree.budget.cost import VerifyCost
from hf_ddtree.drafters.dflash import DFlashDrafter
from hf_ddtree.testing import ScriptedDrafter, tiny_dflash_drafter, tiny_model, truncated_copy

FLAT = VerifyCost([1, 100], [1, 2], [[1.0, 1.0], [1.0, 1.0]])  # nodes are free
STEEP = VerifyCost([1, 2, 100], [1, 2], [[1.0, 1.5, 60.0]] * 2)  # each node costs half a token

DRAFTERS = {
    "look-up": lambda model: None,
    "causal LM": lambda model: truncated_copy(model, 2),
    "DFlash": tiny_dflash_drafter,
    "scripted": lambda model: ScriptedDrafter([5] * 100),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Store what a test measures in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generate_auto_gives_the_text_of_plain_generate(drafter):
    model, prompt = hf_ddtree.enable(tiny_model("llama")), random_ids(12)
    for sampling in ({"do_sample": False}, {"do_sample": True, "tree_sampling": "target"}):
        texts = []
        for options in ({}, {"tree_budget": "auto", "assistant_model": DRAFTERS[drafter](model)}):
            own = {name: value for name, value in sampling.items() if options or name != "tree_sampling"}
            texts.append(generate(model, prompt, seed=1, max_new_tokens=40, **own, **options))
        assert torch.equal(*texts)


@pytest.mark.parametrize("policy", ["hybrid", "swor", "spectr"])
@pytest.mark.parametrize("drafter", ["causal LM", "DFlash"])
def test_generate_auto_samples_with_every_policy(policy, drafter):
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


class Scattered(Drafter):
    """Drafts the right tokens behind decoys, so that the selected tree has other indices than the drafted one."""

    def __init__(self, script: list[int]):
        self.script, self.tree, self.accepted = script, None, []

    def draft(self, input_ids, tree_budget, max_depth):
        right = self.script[input_ids.shape[1] :][: min(3, max_depth)]
        decoys, first = 6, 7
        parents = [-1, *[0] * decoys, 0, *range(first, first + len(right) - 1)][: 1 + decoys + len(right)]
        log_reach = [0.0, *[-12.0] * decoys, *(-0.01 * depth for depth in range(1, len(right) + 1))]
        tokens = [int(input_ids[0, -1]), *range(decoys), *right]
        self.tree = DraftTree.from_lists(tokens, parents, log_reach=log_reach)
        return self.tree

    def commit(self, path, hidden_states):
        self.accepted += [] if path == [0] else self.tree.token_ids[path[1:]].tolist()


def test_generate_auto_tells_drafters_of_nodes_as_they_counted_them(monkeypatch):
    monkeypatch.setattr("hf_ddtree.budget.budget.verify_cost", lambda *_: STEEP)
    model = hf_ddtree.enable(tiny_model("llama"))
    prompt = torch.tensor([[5, 6, 7]])
    plain = model.generate(prompt, max_new_tokens=30, do_sample=False)
    drafter = Scattered(plain[0].tolist())
    options = {"tree_budget": "auto", "return_dict_in_generate": True, "tree_trace": True}
    output = model.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drafter, **options)
    assert torch.equal(output.sequences, plain)
    kept = [r.tree.token_ids[r.path[1:]].tolist() for r in output.rounds[:-1]]
    flat = list(itertools.chain(*kept))
    assert flat and flat == drafter.accepted[: len(flat)]
    assert any(r.tree_size < 6 for r in output.rounds if r.accepted_length)


def test_generate_auto_uses_a_useless_drafter_ever_less(monkeypatch):
    """The drafter is sure of a token that never comes."""
    never, ticks = 0, itertools.count()
    monkeypatch.setattr("hf_ddtree.budget.budget.verify_cost", lambda *_: FLAT)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))

    def sure(self, input_ids, *_):
        return DraftTree.from_lists([int(input_ids[0, -1]), never], [-1, 0], log_reach=[0.0, -0.1])

    monkeypatch.setattr(DFlashDrafter, "draft", sure)
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter, drafts = tiny_dflash_drafter(model), []
    for seed in range(4):
        prompt = random_ids(12, seed=seed)
        settings = {"max_new_tokens": 40, "do_sample": False, "suppress_tokens": [never]}
        options = {"tree_budget": "auto", "assistant_model": drafter, "return_dict_in_generate": True}
        output = model.generate(prompt, **settings, **options)
        assert torch.equal(output.sequences, model.generate(prompt, **settings))
        drafts.append(sum(r.tree_size > 0 for r in output.rounds))
    assert drafts[0] > 6 and drafts[-1] == 1


def test_generate_auto_records_rounds_without_a_draft(monkeypatch):
    monkeypatch.setattr(CostAwareBudget, "begin_round", lambda self, max_depth: 0)
    model = hf_ddtree.enable(tiny_model("llama"))
    output = model.generate(
        torch.tensor([[5, 6, 5, 6]]), max_new_tokens=9, tree_budget="auto", return_dict_in_generate=True
    )
    assert [r.tree_size for r in output.rounds] == [0] * 8


def test_generate_auto_refuses_tensor_parallel_targets():
    model = hf_ddtree.enable(copy.deepcopy(tiny_model("llama")))
    model._tp_size = 2
    with pytest.raises(ValueError, match=r"tree_budget='auto'.*number"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget="auto")


@pytest.mark.parametrize("wrong", ["automatic", "", "8", 0, 2.5])
def test_generate_names_auto_when_it_refuses_other_words(wrong):
    model = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"tree_budget=.*auto"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget=wrong)
