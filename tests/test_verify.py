"""One forward over a tree against forwards over each of its paths, for every supported family and cache."""

import random

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.cache import is_recurrent
from hf_ddtree.selfcheck import check_tree_attention
from hf_ddtree.testing import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    INCONSISTENT_FAMILIES,
    RECURRENT_FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    tiny_dflash_drafter,
    tiny_model,
)
from hf_ddtree.verify import path_to, prefill, tree_verifier

# fp32 rounding over 4 layers with logits of magnitude 1 to 30; a wrong key changes them by more than 1e-2
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def random_tree(rng: random.Random, root: int) -> DraftTree:
    n = rng.randint(1, 14)
    token_ids, parents = [root], [-1]
    for _ in range(n):
        parents.append(rng.randrange(len(parents)))
        token_ids.append(rng.randrange(VOCAB_SIZE))
    return DraftTree.from_lists(token_ids, parents)


def tree_inputs(cache, padding: int) -> dict:
    length = cache.get_seq_length()
    mask = torch.ones(1, length + 1, dtype=torch.long)
    mask[:, :padding] = 0
    positions = torch.tensor([[length - padding]])
    return {"cache": cache, "position_ids": positions, "attention_mask": mask if padding else None, "use_cache": True}


RECURRENT = [*GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES]
CASES = [
    *(pytest.param(family, "from-config", 0, id=family) for family in [*FAMILIES, *RECURRENT]),
    *(pytest.param(family, "from-config", 3, id=f"{family}-padded") for family in [*FAMILIES, *RECURRENT]),
    *(pytest.param(family, "plain", 0, id=f"{family}-full-layers") for family in FAMILIES),
]


@pytest.mark.parametrize("family, cache_kind, padding", CASES)
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

    with tree_verifier(model, cache, use_kernel=False) as verifier:
        for _ in range(6):
            tree = random_tree(rng, root=rng.randrange(VOCAB_SIZE))
            logits = verifier.verify_tree(tree, tree_inputs(cache, padding)).logits[0]
            parents = tree.parents.tolist()
            for node in range(len(tree)):
                chain = sequence + tree.token_ids[path_to(node, parents)].tolist()
                expected = model(input_ids=torch.tensor([chain])).logits[0, -1]
                torch.testing.assert_close(logits[node], expected, **TOLERANCE)
            path = path_to(rng.randrange(len(tree)), parents)
            verifier.commit_path(path)
            sequence += tree.token_ids[path].tolist()
            assert_cache_equals_fresh_prefill(model, cache, sequence, padding)


def assert_cache_equals_fresh_prefill(model, cache, sequence, padding):
    recurrent = any(map(is_recurrent, cache.layers))
    fresh = DynamicCache(config=model.config) if recurrent else DynamicCache()
    model(input_ids=torch.tensor([sequence]), cache=fresh)
    assert cache.get_seq_length() == padding + len(sequence)
    for layer, expected in zip(cache.layers, fresh.layers, strict=True):
        if is_recurrent(layer):
            assert_states_equal(layer.conv_states, expected.conv_states)
            assert_states_equal(layer.recurrent_states, expected.recurrent_states)
        if not isinstance(layer, DynamicLayer):
            continue
        n = min(layer.keys.shape[-2], len(sequence))
        assert n >= min(len(sequence), WINDOW - 1)
        torch.testing.assert_close(layer.keys[..., -n:, :], expected.keys[..., -n:, :], **TOLERANCE)
        torch.testing.assert_close(layer.values[..., -n:, :], expected.values[..., -n:, :], **TOLERANCE)


def assert_states_equal(states: dict, expected: dict):
    for index, state in states.items():
        if state is not None:  # some layers only convolve
            # entries are sums over the whole text: they are as exact as the largest of them
            scale = max(1.0, float(expected[index].abs().max()))
            torch.testing.assert_close(state / scale, expected[index] / scale, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
@torch.no_grad()
def test_the_self_check_passes_every_family(family, dtype):
    check_tree_attention(tiny_model(family).to(dtype), torch.device("cpu"), use_kernel=False)


@pytest.mark.parametrize("family", INCONSISTENT_FAMILIES)
@torch.no_grad()
def test_the_self_check_refuses_models_that_do_not_continue_a_cached_text_as_they_decode(family):
    model = tiny_model(family)
    with pytest.raises(ValueError, match="something else over several tokens"):
        hf_ddtree.enable(model)
    if family != "nemotron_h":  # is off by less than the check can blame on it
        with pytest.raises(ValueError, match="token by token|does not support tree decoding"):
            check_tree_attention(model, torch.device("cpu"), use_kernel=False)


@torch.no_grad()
def test_the_self_check_allows_logits_that_are_masked_or_constant():
    """Padded vocabularies are often masked with -inf; an untrained head may be zero."""
    for weight, bias in ((1.0, -torch.inf), (0.0, 0.0)):
        model = tiny_model("llama", tie_word_embeddings=False)
        model.lm_head.weight.mul_(weight)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB_SIZE))
        model.lm_head.bias[100:] = bias
        check_tree_attention(model, torch.device("cpu"), use_kernel=False)


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


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_fp32_model_may_run_under_autocast(family):
    """As in bf16 every token must be the maximum or, within rounding, tied with it; a wrong mask would be far from that."""
    model = hf_ddtree.enable(tiny_model(family))
    prompt = torch.randint(4, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.generate(prompt, tree_budget=8, max_new_tokens=24, do_sample=False, eos_token_id=None)
        logits = model(output).logits[0, 11:-1].float()
    below = logits.amax(-1) - logits.gather(-1, output[0, 12:, None])[:, 0]
    assert (below <= 0.1 * logits.std()).all()
