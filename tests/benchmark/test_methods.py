"""The ways to generate that are compared."""

import pytest

from hf_ddtree.benchmark.methods import methods
from hf_ddtree.drafters.chain import ChainDrafter
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama")


@pytest.mark.parametrize("budget", [8, "auto"])
def test_methods_have_a_tree_per_budget(target, budget):
    *_, method = methods(target, None, [4, budget])
    assert (method.name, method.tree_budget) == (f"tree {budget}", budget)
    assert method.arguments() == {"assistant_model": None, "tree_budget": budget}


def test_methods_with_a_dflash_drafter_have_a_new_chain_per_call(target):
    compared = methods(target, tiny_dflash_drafter(target), [])
    assert [method.name for method in compared] == ["plain", "native look-up", "chain"]
    chains = [compared[-1].arguments()["assistant_model"] for _ in range(2)]
    assert all(isinstance(chain, ChainDrafter) for chain in chains)
    assert chains[0] is not chains[1]
    assert compared[-1].tree_budget is None


def test_methods_with_a_causal_lm_have_native_assisted_generation(target):
    drafter = tiny_model("llama", seed=1)
    compared = methods(target, drafter, [])
    assert [method.name for method in compared] == ["plain", "native look-up", "native assisted"]
    assert compared[-1].arguments() == {"assistant_model": drafter}


def test_methods_without_a_drafter_have_no_chain(target):
    assert [method.name for method in methods(target, None, [])] == ["plain", "native look-up"]
