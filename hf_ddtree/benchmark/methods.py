"""The ways to generate that are compared."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationMixin, PreTrainedModel

from ..drafters import DFlashTreeGenerator, DraftSampling
from ..tree import POLICIES, DraftTree

PLAIN = "plain"
NATIVE_LOOK_UP_TOKENS = 10


@dataclass(frozen=True)
class Method:
    """A way to call `generate`.

    Args:
        name: in tables and plots.
        arguments: makes the keyword arguments of one call, beside those all methods share.
        tree_budget: a tree's, None for everything else.
    """

    name: str
    arguments: Callable[[], dict]
    tree_budget: int | str | None = None


class ChainGenerator(DFlashTreeGenerator):
    """DFlash without a tree: the single most probable path, whatever the budget."""

    def get_candidates(self, input_ids, tree_budget, max_depth):
        draft_logits = self.sampling.warp(self.draft(int(input_ids[0, -1]))[:max_depth])
        chain = draft_logits.argmax(-1).tolist()
        return DraftTree.from_lists([int(input_ids[0, -1]), *chain], list(range(-1, len(chain))))


def chain_generator(drafter: PreTrainedModel, target: PreTrainedModel) -> ChainGenerator:
    """A `ChainGenerator` for one call with the target's own settings."""
    return ChainGenerator(drafter, target, DraftSampling(target.generation_config, POLICIES["target"]))


def methods(target: PreTrainedModel, drafter: PreTrainedModel | None, tree_budgets: list[int | str]) -> list[Method]:
    """Plain generate, what transformers has, the chain of a DFlash drafter, and trees of the given budgets."""
    result = [
        Method(PLAIN, dict),
        Method("native look-up", lambda: {"prompt_lookup_num_tokens": NATIVE_LOOK_UP_TOKENS}),
    ]
    if isinstance(drafter, GenerationMixin):
        result.append(Method("native assisted", lambda: {"assistant_model": drafter}))
    elif drafter is not None:
        result.append(Method("chain", lambda: {"assistant_model": chain_generator(drafter, target), "tree_budget": 1}))
    result += [
        Method(f"tree {budget}", lambda budget=budget: {"assistant_model": drafter, "tree_budget": budget}, budget)
        for budget in tree_budgets
    ]
    return result
