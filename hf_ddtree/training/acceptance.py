"""Held-out acceptance without decoding: the target's greedy answers are known, so acceptance is a look-up."""

import torch
from transformers import PreTrainedModel

from ..build import build_tree
from ..tree import DraftTree
from .blocks import draft_blocks, make_batch, target_states
from .data import Sequence

CHAIN = 0  # as a tree budget: the chain of the most probable tokens


@torch.no_grad()
def held_out_tokens_per_round(
    drafter: PreTrainedModel, target: PreTrainedModel, sequences: list[Sequence], budgets: tuple[int, ...]
) -> dict[int, float]:
    """Return the tokens per round of greedy decoding along the answers of all sequences, by tree budget.

    Args:
        drafter: a DFlash drafter in evaluation mode and in the target's dtype.
        target: provides the hidden states, the embedding and the head.
        sequences: prompts and the target's greedy answers.
        budgets: tree budgets, or `CHAIN`.
    """
    emitted, rounds = dict.fromkeys(budgets, 0), dict.fromkeys(budgets, 0)
    head = target.get_output_embeddings()
    for sequence in sequences:
        states = _states_after_each_root(drafter, target, sequence)
        # the same logits serve all budgets, and most roots are skipped by all of them
        draft_logits: dict[int, torch.Tensor] = {}
        for budget in budgets:
            root = 0
            while root < len(states):
                if root not in draft_logits:
                    draft_logits[root] = head(states[root]).float()
                answer = sequence.tokens[sequence.prompt_length + root + 1 : -1].tolist()
                kept = accepted_length(tree_of_budget(draft_logits[root], budget), answer)
                emitted[budget] += kept + 1
                rounds[budget] += 1
                root += kept + 1
    return {budget: emitted[budget] / max(1, rounds[budget]) for budget in budgets}


def _states_after_each_root(drafter: PreTrainedModel, target: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    """Return the drafter's states `[roots, depth, H]`, a block for each answer token except the last."""
    n_roots = len(sequence.tokens) - 1 - sequence.prompt_length
    if n_roots < 1:
        return torch.empty(0, dtype=target.dtype, device=target.device)
    batch = make_batch([sequence], n_roots, drafter.config.block_size, generator=None).to(target.device)
    context, _ = target_states(target, batch, drafter.config.target_layer_ids)
    return draft_blocks(drafter, drafter.config, target.get_input_embeddings(), batch, context)[0]


def tree_of_budget(draft_logits: torch.Tensor, budget: int) -> DraftTree:
    """Return the tree that the drafter proposes within a budget.

    Args:
        draft_logits: `[depth, V]` float.
        budget: the number of drafted nodes, or `CHAIN` for the chain of the most probable tokens.
    """
    if budget != CHAIN:
        return build_tree(draft_logits, budget)
    unknown_root = -1
    return DraftTree.chain([unknown_root, *draft_logits.argmax(-1).tolist()])


def accepted_length(tree: DraftTree, answer: list[int]) -> int:
    """Return how many drafted tokens a greedy walk accepts.

    Args:
        tree: the drafted tree.
        answer: the target's tokens after the root.
    """
    node = 0
    for kept, token in enumerate(answer):
        child = tree.child(node, token)
        if child is None:
            return kept
        node = child
    return len(answer)
