"""The timing pass."""

import pytest
import torch
from benchmark.support import case
from helpers import random_ids, write_speculators_drafter

import hf_ddtree
from hf_ddtree.benchmark.methods import methods
from hf_ddtree.benchmark.run import warm_up
from hf_ddtree.benchmark.stages import FORWARDS, STAGES, drafting_modules, forward_times, timing_rows
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture
def target():
    return hf_ddtree.enable(tiny_model("llama"))


def speculators_drafter(target, folder):
    write_speculators_drafter(folder, target)
    return hf_ddtree.load_drafter(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "make, calls",
    [
        pytest.param(lambda target, _: tiny_dflash_drafter(target), 2, id="dflash"),
        pytest.param(speculators_drafter, 2, id="speculators"),
        pytest.param(lambda *_: None, 0, id="look-up"),
    ],
)
def test_forward_times_have_one_target_forward_per_round_and_the_calls_that_draft(target, tmp_path, make, calls):
    """A round that drafts calls the drafter and the head."""
    drafter, prompt = make(target, tmp_path), random_ids(8)
    settings = {"assistant_model": drafter, "tree_budget": 4, "max_new_tokens": 12, "return_dict_in_generate": True}
    target.generate(prompt, do_sample=False, **settings)  # runs the check on first use
    with forward_times(target, drafting_modules(target, drafter)) as times:
        rounds = target.generate(prompt, do_sample=False, **settings).rounds
    assert len(times["target forward"]) == 1 + len(rounds)
    drafting = rounds if calls == 0 else [r for r in rounds if r.tree_size]
    assert len(times["drafter forward"]) == calls * len(drafting)
    target.generate(prompt, do_sample=False, **settings)
    assert len(times["target forward"]) == 1 + len(rounds), "the hooks must be removed"


def test_timing_rows_skip_methods_without_rounds(target):
    compared = methods(target, tiny_dflash_drafter(target), [4])
    warm_up(target, compared)  # the check on first use would count as target forwards
    rows = timing_rows(case(target, random_ids(6)), compared)
    assert [row["method"] for row in rows] == ["chain", "tree 4"]
    for row in rows:
        assert row["pass"] == "timing" and row["rounds"] > 0
        assert list(row["seconds"]) == [*STAGES, *FORWARDS] and min(row["seconds"].values()) > 0
        assert row["seconds"]["target forward"] < row["seconds"]["verify"]
