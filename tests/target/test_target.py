"""Verifying trees and committing paths over several rounds, for every supported family and cache."""

import random
from types import SimpleNamespace

import pytest
import torch
from helpers import random_ids
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.target.cache import is_recurrent
from hf_ddtree.target.target import Target
from hf_ddtree.testing import FAMILIES, GATED_DELTA_FAMILIES, RECURRENT_FAMILIES, VOCAB_SIZE, WINDOW, tiny_model

# fp32 rounding over 4 layers with logits of magnitude 1 to 30. A wrong key changes them by more than 1e-2.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}

RECURRENT = [*GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES]
CASES = [
    *(pytest.param(family, "from-config", 0, id=family) for family in [*FAMILIES, *RECURRENT]),
    *(pytest.param(family, "from-config", 3, id=f"{family}-padded") for family in [*FAMILIES, *RECURRENT]),
    *(pytest.param(family, "plain", 0, id=f"{family}-full-layers") for family in FAMILIES),
]


def random_tree(rng: random.Random) -> DraftTree:
    token_ids, parents = [rng.randrange(VOCAB_SIZE)], [-1]
    for _ in range(rng.randint(1, 14)):
        parents.append(rng.randrange(len(parents)))
        token_ids.append(rng.randrange(VOCAB_SIZE))
    return DraftTree.from_lists(token_ids, parents)


def target_after(model, sequence: list[int], cache: DynamicCache, padding: int) -> Target:
    """Return a target whose cache holds a sequence behind left padding."""
    padded = torch.tensor([[0] * padding + sequence])
    mask = (torch.arange(padded.shape[1] + 1) >= padding).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"cache": cache, "position_ids": positions, "attention_mask": mask if padding else None, "use_cache": True}
    prompt = {**inputs, "position_ids": positions[:, :-1], "attention_mask": mask[:, :-1] if padding else None}
    model(input_ids=padded, **prompt)
    return Target(model, inputs)


@pytest.mark.parametrize("family, cache_kind, padding", CASES)
@torch.no_grad()
def test_verify_equals_each_nodes_own_chain_over_six_rounds(family, cache_kind, padding):
    model = tiny_model(family)
    rng = random.Random(family + cache_kind)
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config) if cache_kind == "from-config" else DynamicCache()
    sequence = [rng.randrange(VOCAB_SIZE) for _ in range(WINDOW + 6)]
    target = target_after(model, sequence, cache, padding)
    with target.decoding():
        for _ in range(6):
            tree = random_tree(rng)
            logits = target.verify([tree]).logits[0]
            for node in range(len(tree)):
                chain = sequence + tree.token_ids[tree.path_to(node)].tolist()
                expected = model(input_ids=torch.tensor([chain])).logits[0, -1]
                torch.testing.assert_close(logits[node], expected, **TOLERANCE)
            path = tree.path_to(rng.randrange(len(tree)))
            target.commit([path])
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
            # entries are sums over the whole text, so they are as exact as the largest of them
            scale = max(1.0, float(expected[index].abs().max()))
            torch.testing.assert_close(state / scale, expected[index] / scale, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_verify_works_under_autocast(family):
    """As in bf16, every token must be the maximum or tied with it within rounding. A wrong mask is far from that."""
    model = hf_ddtree.enable(tiny_model(family))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.generate(random_ids(12), tree_budget=8, max_new_tokens=24, do_sample=False, eos_token_id=None)
        logits = model(output).logits[0, 11:-1].float()
    below = logits.amax(-1) - logits.gather(-1, output[0, 12:, None])[:, 0]
    assert (below <= 0.1 * logits.std()).all()


TREE = DraftTree.from_lists([7, 8, 9, 10], [-1, 0, 0, 2])


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "lfm2"])
@torch.no_grad()
def test_after_continues_the_tokens(family):
    model, tokens = tiny_model(family), random_ids(20)[0]
    target = Target.after(model, tokens)
    assert target.cache.get_seq_length() == 20 and target.device.type == "cpu"
    with target.decoding():
        logits = target.verify([TREE]).logits[0]
    chain = torch.cat([tokens, TREE.token_ids[[0, 2, 3]]])
    torch.testing.assert_close(logits[[0, 2, 3]], model(input_ids=chain[None]).logits[0, -3:], **TOLERANCE)


@torch.no_grad()
def test_commit_moves_on_to_the_next_root():
    target = target_after(tiny_model("llama"), [5] * 6, DynamicCache(), padding=2)
    with target.decoding():
        target.verify([TREE])
        target.commit([[0, 2]])
    assert target.model_kwargs["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert target.model_kwargs["attention_mask"].tolist() == [[0, 0, *[1] * 9]]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@torch.no_grad()
def test_commit_returns_the_tapped_states_of_the_path(family):
    model, tokens, taps = tiny_model(family), random_ids(20)[0], (1, 3)
    target = Target.after(model, tokens)
    target.taps = taps
    with target.decoding():
        target.verify([TREE])
        [states] = target.commit([[0, 2, 3]])
    chain = torch.cat([tokens, TREE.token_ids[[0, 2, 3]]])[None]
    expected = model(input_ids=chain, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states, torch.cat([expected[tap] for tap in taps], -1)[:, -3:], **TOLERANCE)


@torch.no_grad()
def test_prefill_moves_on_to_the_first_root():
    model, prompt = tiny_model("llama"), random_ids(9)
    inputs = {"cache": DynamicCache(), "position_ids": torch.arange(9)[None], "attention_mask": None, "use_cache": True}
    target = Target(model, inputs, taps=(2,))
    outputs, states, positions = target.prefill(prompt, model.generation_config)
    assert target.model_kwargs["position_ids"].tolist() == [list(range(10))]
    assert target.cache.get_seq_length() == 9 and positions.tolist() == [list(range(9))]
    expected = model(input_ids=prompt, output_hidden_states=True)
    torch.testing.assert_close(outputs.logits[:, -1], expected.logits[:, -1], **TOLERANCE)
    torch.testing.assert_close(states, expected.hidden_states[2], **TOLERANCE)


@torch.no_grad()
def test_decoding_drops_an_uncommitted_tree():
    target = Target.after(tiny_model("llama"), random_ids(20)[0])
    with pytest.raises(KeyError), target.decoding():
        target.verify([TREE])
        raise KeyError
    assert target.cache.get_seq_length() == 20


@pytest.mark.parametrize(
    "length, room, expected",
    [
        pytest.param(10, 5, 5, id="the room is smaller"),
        pytest.param(27, 9, 4, id="the last position is nearer"),
        pytest.param(31, 9, 0, id="the root stands on the last position"),
        pytest.param(40, 9, 9, id="the text is longer than the positions"),
    ],
)
def test_max_depth_is_bounded_by_the_room_and_the_positions(length, room, expected):
    model = tiny_model("llama", max_position_embeddings=32)
    target = Target(model, {"position_ids": torch.arange(length + 1)[None]})
    assert target.max_depth(room) == expected
    target.config = SimpleNamespace()  # a model whose config names no last position
    assert target.max_depth(room) == room


def test_verify_and_commit_refuse_to_run_outside_decoding():
    target = Target.after(tiny_model("llama"), random_ids(5)[0])
    for call in (lambda: target.verify([TREE]), lambda: target.commit([[0]])):
        with pytest.raises(RuntimeError, match="decoding"):
            call()
