"""Held-out acceptance without running the target: its greedy answers are known, so acceptance is a look-up."""

import torch
from transformers import PreTrainedModel

from ..drafters import DFlashDraftModel
from ..tree import DraftTree, build_tree
from .blocks import draft_blocks, make_batch, target_states
from .data import Sequence

CHAIN = 0  # as a tree budget: the single most probable path


@torch.no_grad()
def held_out_tokens_per_round(
    drafter: DFlashDraftModel, target: PreTrainedModel, sequences: list[Sequence], budgets: tuple[int, ...]
) -> dict[int, float]:
    """tokens_per_round of greedy decoding along each sequence, for each tree budget.

    Args:
        drafter: in evaluation mode, in the target's dtype.
        sequences: greedy answers of the target.
        budgets: tree budgets, or `CHAIN`.
    """
    emitted, rounds = dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0)
    head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    for sequence in sequences:
        n_anchors = len(sequence.tokens) - 1 - sequence.prompt_length
        if n_anchors < 1:
            continue
        batch = make_batch([sequence], n_anchors, drafter.config.block_size, generator=None).to(target.device)
        context, _ = target_states(target, batch, drafter.config.target_layer_ids)
        states = draft_blocks(drafter, drafter.config, embedding, batch, context)[0]
        draft_logits = [None] * n_anchors
        for budget in budgets:
            anchor = 0
            while anchor < n_anchors:
                if draft_logits[anchor] is None:
                    draft_logits[anchor] = head(states[anchor]).float()
                answer = sequence.tokens[sequence.prompt_length + anchor + 1 :].tolist()
                kept = accepted_length(draft(draft_logits[anchor], budget), answer[:-1])
                emitted[budget] += kept + 1
                rounds[budget] += 1
                anchor += kept + 1
    return {budget: emitted[budget] / max(1, rounds[budget]) for budget in budgets}


def draft(draft_logits: torch.Tensor, budget: int) -> DraftTree:
    """The tree of a budget, or the chain of the most probable tokens."""
    if budget != CHAIN:
        return build_tree(draft_logits, budget)
    chain = draft_logits.argmax(-1).tolist()
    return DraftTree.from_lists([-1, *chain], list(range(-1, len(chain))))


def accepted_length(tree: DraftTree, answer: list[int]) -> int:
    """How many tokens of `answer` the walk finds in the tree."""
    node = 0
    for kept, token in enumerate(answer):
        node = tree.child(node, token)
        if node is None:
            return kept
    return len(answer)
