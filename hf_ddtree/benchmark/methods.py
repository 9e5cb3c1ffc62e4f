"""The ways to generate that the benchmark compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ..drafters.chain import chain_drafter

PLAIN = "plain"
NATIVE_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Method:
    """A way to call `generate`.

    Args:
        name: its name in tables and plots.
        arguments: returns the keyword arguments of one call, in addition to those that all methods share. It is called
            once per answer, because a drafter object serves one call.
        tree_budget: the budget of a tree, None for every other method.
    """

    name: str
    arguments: Callable[[], dict[str, Any]]
    tree_budget: int | str | None = None


def methods(target: PreTrainedModel, drafter: PreTrainedModel | None, tree_budgets: list[int | str]) -> list[Method]:
    """Return plain generate, transformers' own methods, the chain of a DFlash drafter, and one tree per budget.

    Args:
        target: the enabled target.
        drafter: a DFlash model, a causal LM, or None for trees from prompt look-up.
        tree_budgets: the budgets of the trees.
    """
    result = [
        Method(PLAIN, dict),
        Method("native look-up", lambda: {"prompt_lookup_num_tokens": NATIVE_LOOKUP_TOKENS}),
    ]
    if isinstance(drafter, GenerationMixin):
        result.append(Method("native assisted", lambda: {"assistant_model": drafter}))
    elif drafter is not None:
        # a chain has the depth of the block, whatever the budget
        result.append(Method("chain", lambda: {"assistant_model": chain_drafter(drafter, target), "tree_budget": 1}))
    return result + [_tree_method(drafter, tree_budget) for tree_budget in tree_budgets]


def _tree_method(drafter: PreTrainedModel | None, tree_budget: int | str) -> Method:
    arguments = {"assistant_model": drafter, "tree_budget": tree_budget}
    return Method(f"tree {tree_budget}", lambda: arguments, tree_budget)
