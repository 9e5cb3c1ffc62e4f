"""Keeping an accepted path in a cache and dropping the rest of the tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache, StaticCache

from hf_ddtree.checks import check_cache
from hf_ddtree.target.cache import commit_path, is_recurrent, uncommitted_rows

WINDOW = 6


def config():
    return AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=WINDOW)


def append(cache, labels: list[float]) -> None:
    """Add one row per label to both layers. A value is the negative of its key."""
    keys = torch.tensor(labels)[None, None, :, None].expand(1, 2, -1, 3).contiguous()
    for layer in range(2):
        cache.update(keys, -keys, layer)


def rows(cache, layer: int) -> list[float]:
    assert torch.equal(cache.layers[layer].values, -cache.layers[layer].keys)
    return cache.layers[layer].keys[0, 1, :, 2].tolist()


@st.composite
def rounds(draw):
    """Draw a few rounds, each a number of nodes and an ascending path that starts with the root."""
    result = []
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 12))
        others = draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
        result.append((n, [0, *sorted(others)]))
    return result


@settings(deadline=None)
@given(prompt=st.integers(1, 15), rounds=rounds(), with_config=st.booleans())
def test_commit_path_keeps_the_accepted_rows_in_every_round(prompt, rounds, with_config):
    cache = DynamicCache(config=config()) if with_config else DynamicCache()
    sequence = [float(i) for i in range(prompt)]
    append(cache, sequence)
    label = 100.0
    with uncommitted_rows(cache) as committed:
        for n, path in rounds:
            nodes = [label + i for i in range(n)]
            label += n
            append(cache, nodes)
            commit_path(cache, path, n)
            committed.length += len(path)
            sequence += [nodes[node] for node in path]
            assert cache.get_seq_length() == len(sequence)
            assert rows(cache, 1) == sequence
            sliding = rows(cache, 0)
            assert sliding == sequence[-len(sliding) :]
            assert len(sliding) >= min(len(sequence), WINDOW - 1)


def test_uncommitted_rows_are_dropped_in_the_middle_of_a_round():
    cache = DynamicCache(config=config())
    append(cache, [0.0, 1.0, 2.0])
    with pytest.raises(KeyError), uncommitted_rows(cache) as committed:
        append(cache, [10.0, 11.0, 12.0, 13.0])
        commit_path(cache, [0, 2], 4)
        committed.length += 2
        keys = torch.zeros(1, 2, 5, 3)
        cache.update(keys, keys, 0)  # a forward that failed after its first layer
        raise KeyError
    assert rows(cache, 0) == rows(cache, 1) == [0.0, 1.0, 2.0, 10.0, 12.0]


def test_uncommitted_rows_stops_recording_past_rows():
    cache = DynamicCache(config=config())
    append(cache, [0.0])
    with uncommitted_rows(cache):
        assert cache.layers[0].record_past
    assert not cache.layers[0].record_past


def test_check_cache_refuses_layers_that_cannot_keep_scattered_rows():
    check_cache(DynamicCache(config=config()))
    with pytest.raises(ValueError, match="cache: a layer of type Static"):
        check_cache(StaticCache(config=config(), max_cache_len=32))
    check_cache(DynamicCache(config=AutoConfig.for_model("qwen3_next")))
    with pytest.raises(ValueError, match="cache: all layers are recurrent"):
        check_cache(DynamicCache(config=AutoConfig.for_model("mamba2")))


def test_is_recurrent_tells_the_layers_of_a_hybrid_apart():
    layer_types = ["linear_attention", "full_attention"] * 2
    model_config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, layer_types=layer_types)
    assert [is_recurrent(layer) for layer in DynamicCache(config=model_config).layers] == [True, False] * 2
