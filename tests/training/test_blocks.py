"""Many blocks per sequence in one forward."""

import torch
from helpers import random_ids

from hf_ddtree.drafters.dflash import embed_without_norm
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.training.blocks import IGNORED, draft_blocks, make_batch, target_states
from hf_ddtree.training.data import Sequence


def draft_one_block(drafter, target, sequence: torch.Tensor) -> torch.Tensor:
    """The logits `[block_size - 1, V]` of the block after `sequence` `[1, n]`, without a mask or other blocks."""
    config = drafter.config
    hidden_states = target(input_ids=sequence[:, :-1], output_hidden_states=True).hidden_states
    context = torch.cat([hidden_states[layer + 1] for layer in config.target_layer_ids], dim=-1)
    block = torch.tensor([[int(sequence[0, -1])] + [config.mask_token_id] * (config.block_size - 1)])
    states = drafter(
        noise_embeds=embed_without_norm(target.get_input_embeddings(), block),
        context_hidden_states=context,
        position_ids=torch.arange(context.shape[1] + config.block_size)[None],
    ).last_hidden_state
    return target.get_output_embeddings()(states)[0, 1:]


@torch.no_grad()
def test_draft_blocks_equals_one_block_at_a_time():
    target = tiny_model("llama")
    drafter = tiny_dflash_drafter(target)
    sequences = [Sequence(random_ids(n, seed=n)[0], 5, 0.0) for n in (12, 20)]
    batch = make_batch(sequences, 6, drafter.config.block_size, torch.Generator().manual_seed(0))
    context, _ = target_states(target, batch, drafter.config.target_layer_ids)
    states = draft_blocks(drafter, drafter.config, target.get_input_embeddings(), batch, context)
    head = target.get_output_embeddings()
    n_blocks = 0
    for row, sequence in enumerate(sequences):
        for block, anchor in enumerate(batch.anchors[row].tolist()):
            if (batch.labels[row, block] == IGNORED).all():
                continue
            alone = draft_one_block(drafter, target, sequence.tokens[None, : anchor + 1])
            torch.testing.assert_close(head(states[row, block]), alone, rtol=2e-4, atol=2e-4)
            n_blocks += 1
    assert n_blocks == 12


def test_make_batch_labels_are_the_successors_of_the_root():
    sequences = [Sequence(random_ids(n, seed=n)[0], 5, 0.0) for n in (9, 20)]
    batch = make_batch(sequences, 6, 5, torch.Generator().manual_seed(0))
    n_used = [0, 0]
    for row, sequence in enumerate(sequences):
        for anchor, labels in zip(batch.anchors[row].tolist(), batch.labels[row], strict=True):
            if (labels == IGNORED).all():
                continue
            n_used[row] += 1
            successors = sequence.tokens[anchor + 1 : anchor + 1 + len(labels)]
            assert anchor >= sequence.prompt_length and len(successors) > 0
            assert labels[: len(successors)].tolist() == successors.tolist()
            assert (labels[len(successors) :] == IGNORED).all()
    assert n_used == [3, 6]  # the short answer has three tokens with a successor
    assert batch.valid.sum(1).tolist() == [9, 20]


def test_make_batch_takes_the_first_roots_without_a_generator():
    batch = make_batch([Sequence(random_ids(20)[0], 5, 0.0)], 4, 5, generator=None)
    assert batch.anchors.tolist() == [[5, 6, 7, 8]]
