"""The decoding loop: prefill, then draft, verify, walk and commit until every sequence has ended.

Trees, paths and emitters come in lists with one entry per row of the batch. Today a batch has one row.
"""

from .budget.budget import Budget
from .drafters.base import Drafter, draft_tree
from .output import Recorder
from .request import Request
from .target.target import Target
from .walk import Emitter, walk_tree


def decode(
    target: Target, drafter: Drafter, budget: Budget, emitters: list[Emitter], recorder: Recorder, request: Request
) -> None:
    """Extend the sequences to their end, with several tokens per target forward.

    Args:
        target: the model with the inputs of the call.
        drafter: drafts the trees.
        budget: decides how many nodes a round drafts and verifies.
        emitters: one sequence per row. They hold the prompt, and afterwards the finished text.
        recorder: collects what the call returns beside the tokens.
        request: the request.
    """
    [emitter] = emitters
    outputs, prompt_states, position_ids = target.prefill(emitter.input_ids, request.generation_config)
    drafter.prefill(prompt_states, position_ids)
    recorder.add_hidden_states(outputs, rows=slice(None))
    emitter.emit(outputs.logits[:, -1])

    with target.decoding():
        while not emitter.finished:
            max_depth = target.max_depth(room=request.max_length - emitter.length - 1)
            with recorder.stage("draft"):
                n_nodes = budget.begin_round(max_depth)
                sequences = [emitter.sequence for emitter in emitters]
                trees = [draft_tree(drafter, ids, n_nodes, max_depth, target.vocab_size) for ids in sequences]
                trees = budget.select_nodes(trees)
            with recorder.stage("verify"):
                outputs = target.verify(trees)
            with recorder.stage("walk"):
                rows = zip(trees, emitters, strict=True)
                paths = [walk_tree(tree, outputs.logits, emitter) for tree, emitter in rows]
            with recorder.stage("commit"):
                path_states = target.commit(paths)
                drafter.update_acceptance(emitter.take_overlaps())
                # also after the last round, because the drafter may be given the cache of this text again
                for path, states in zip(budget.drafted_paths(paths), path_states, strict=True):
                    drafter.commit(path, states)
            budget.end_round(paths)
            for tree, path in zip(trees, paths, strict=True):
                recorder.add_round(tree, path, outputs)
