"""One forward over a tree against forwards over each of its paths, for every supported family and cache."""

import random

import pytest
import torch
from transformers import DynamicCache

from hf_ddtree import DraftTree
from hf_ddtree.cache import commit_path, uncommitted_rows
from hf_ddtree.selfcheck import check_tree_attention
from hf_ddtree.testing import FAMILIES, VOCAB_SIZE, WINDOW, tiny_dflash_drafter, tiny_model
from hf_ddtree.verify import prefill, verify_tree

# fp32 rounding over 4 layers with logits of magnitude 1 to 30; a wrong key changes them by more than 1e-2
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def random_tree(rng: random.Random, root: int) -> DraftTree:
    n = rng.randint(1, 14)
    token_ids, parents = [root], [-1]
    for _ in range(n):
        parents.append(rng.randrange(len(parents)))
        token_ids.append(rng.randrange(VOCAB_SIZE))
    return DraftTree.from_lists(token_ids, parents)


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def tree_inputs(cache, padding: int) -> dict:
    length = cache.get_seq_length()
    mask = torch.ones(1, length + 1, dtype=torch.long)
    mask[:, :padding] = 0
    positions = torch.tensor([[length - padding]])
    return {"cache": cache, "position_ids": positions, "attention_mask": mask if padding else None, "use_cache": True}


@pytest.mark.parametrize(
    "cache_kind, padding",
    [
        pytest.param("from-config", 0, id="sliding layers"),
        pytest.param("from-config", 3, id="left padding"),
        pytest.param("plain", 0, id="full layers"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_node_equals_its_own_chain_over_six_rounds(family, cache_kind, padding):
    model = tiny_model(family)
    rng = random.Random(family + cache_kind)
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config) if cache_kind == "from-config" else DynamicCache()
    sequence = [rng.randrange(VOCAB_SIZE) for _ in range(WINDOW + 6)]
    padded = torch.tensor([[0] * padding + sequence])
    mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(input_ids=padded, attention_mask=mask if padding else None, position_ids=positions, cache=cache)

    with uncommitted_rows(cache) as committed:
        for _ in range(6):
            tree = random_tree(rng, root=rng.randrange(VOCAB_SIZE))
            logits = verify_tree(model, tree, tree_inputs(cache, padding)).logits[0]
            for node in range(len(tree)):
                chain = sequence + tree.token_ids[path_to(tree, node)].tolist()
                expected = model(input_ids=torch.tensor([chain])).logits[0, -1]
                torch.testing.assert_close(logits[node], expected, **TOLERANCE)
            path = path_to(tree, rng.randrange(len(tree)))
            commit_path(cache, path, len(tree))
            committed.length += len(path)
            sequence += tree.token_ids[path].tolist()
            assert_cache_equals_fresh_prefill(model, cache, sequence, padding)


def assert_cache_equals_fresh_prefill(model, cache, sequence, padding):
    fresh = DynamicCache()
    model(input_ids=torch.tensor([sequence]), cache=fresh)
    assert cache.get_seq_length() == padding + len(sequence)
    for layer, expected in zip(cache.layers, fresh.layers, strict=True):
        n = min(layer.keys.shape[-2], len(sequence))
        assert n >= min(len(sequence), WINDOW - 1)
        torch.testing.assert_close(layer.keys[..., -n:, :], expected.keys[..., -n:, :], **TOLERANCE)
        torch.testing.assert_close(layer.values[..., -n:, :], expected.values[..., -n:, :], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_self_check_passes_every_family(family, dtype):
    check_tree_attention(tiny_model(family).to(dtype), torch.device("cpu"))


@torch.no_grad()
def test_the_self_check_allows_logits_that_are_masked_or_constant():
    """Padded vocabularies are often masked with -inf; an untrained head may be zero."""
    for weight, bias in ((1.0, -torch.inf), (0.0, 0.0)):
        model = tiny_model("llama", tie_word_embeddings=False)
        model.lm_head.weight.mul_(weight)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE))
        model.lm_head.bias[100:] = bias
        check_tree_attention(model, torch.device("cpu"))


@pytest.mark.parametrize("chunk_size", [None, 1, 5, 100])
@torch.no_grad()
def test_prefill_hands_over_the_states_of_all_prompt_tokens(chunk_size):
    model = tiny_model("llama")
    taps = tuple(layer + 1 for layer in tiny_dflash_drafter(model).config.target_layer_ids)
    prompt = torch.randint(4, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) >= 2).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {
        "cache": DynamicCache(),
        "attention_mask": mask,
        "position_ids": positions,
        "use_cache": True,
        "logits_to_keep": 1,
    }
    settings = model.generation_config
    settings.prefill_chunk_size = chunk_size
    outputs, (states, state_positions) = prefill(model, prompt, settings, kwargs, taps)
    expected = model(input_ids=prompt[:, 2:], output_hidden_states=True).hidden_states
    torch.testing.assert_close(states, torch.cat([expected[tap] for tap in taps], -1), **TOLERANCE)
    assert state_positions.tolist() == [list(range(10))]
    assert outputs.logits.shape[1] == 1
