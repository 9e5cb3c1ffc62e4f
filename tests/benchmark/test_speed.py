"""The speed pass."""

from benchmark.support import case
from helpers import random_ids

import hf_ddtree
from hf_ddtree.benchmark.methods import Method, methods
from hf_ddtree.benchmark.speed import acceptance, speed_rows
from hf_ddtree.output import Round
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


def spied(method: Method, calls: list[str]) -> Method:
    """Return the method, which then adds its name to `calls` whenever it is called."""

    def arguments():
        calls.append(method.name)
        return method.arguments()

    return Method(method.name, arguments, method.tree_budget)


def test_speed_rows_let_the_methods_take_turns():
    target = hf_ddtree.enable(tiny_model("llama"))
    calls: list[str] = []
    compared = [spied(method, calls) for method in methods(target, tiny_dflash_drafter(target), [4])]
    names = [method.name for method in compared]
    for seed in range(2):
        rows = speed_rows(case(target, random_ids(3), seed=seed), compared)
        assert [row["method"] for row in rows] == names
    assert calls == names + names[1:] + names[:1]


def test_acceptance_counts_rounds_by_accepted_length():
    rounds = [Round(tree_size=size, accepted_length=length) for size, length in ((4, 2), (4, 0), (1, 2), (3, 1))]
    assert acceptance(rounds) == {"tokens_per_round": 2.25, "tree_size": 3.0, "accepted_lengths": [1, 1, 2]}


def test_acceptance_without_rounds_is_none():
    expected = {"tokens_per_round": None, "tree_size": None, "accepted_lengths": None}
    assert acceptance(None) == acceptance([]) == expected
