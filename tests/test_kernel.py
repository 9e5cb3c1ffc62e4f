"""The Triton kernel against its fp64 reference, in Triton's interpreter; and compiled for GPUs that need not be there."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
OPTIONS = ("first_valid", "window", "softcap", "sinks")
# relative to the largest entry: sums of some hundred products in fp32; bf16 and fp16 round inputs and output
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def kernels():
    """The modules, with kernels that run in the interpreter; the environment decides when they are defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from hf_ddtree.kernels import reference, tree_attention

        yield reference, tree_attention


def random_tree(rng: random.Random, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
    for node in range(n):
        if node:
            parent = rng.randrange(node)
            mask[node], depths[node] = mask[parent], depths[parent] + 1
        mask[node, node] = True
    return mask, depths


def random_case(reference, seed: int, options: tuple[str, ...], dtype=torch.float32, **shape):
    """Arguments of one call; keys and queries are views with strides as in a cache, between them lies NaN."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n_batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
    n_nodes = shape.get("n_nodes", rng.choice([1, 2, 7, 33, 70]))
    head_dim = shape.get("head_dim", rng.choice([32, 48, 64, 80]))
    value_dim = shape.get("value_dim", rng.choice([head_dim, 32]))
    prefix = torch.tensor([rng.choice([0, 1, 63, 64, 65, rng.randint(0, 400)]) for _ in range(n_batch)], dtype=torch.int32)
    n_keys = int(prefix.max()) + n_nodes
    query = torch.randn(n_batch, n_nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    key = torch.full((n_batch, n_keys + 5, kv_heads, head_dim), torch.nan).transpose(1, 2)[:, :, :n_keys]
    value = torch.full((n_batch, kv_heads, n_keys + 5, value_dim), torch.nan)[:, :, :n_keys]
    for row, length in enumerate((prefix + n_nodes).tolist()):
        key[row, :, :length] = torch.randn(kv_heads, length, head_dim, generator=generator)
        value[row, :, :length] = torch.randn(kv_heads, length, value_dim, generator=generator)
    trees = [random_tree(rng, n_nodes) for _ in range(n_batch)]
    arguments = {
        "query": query.to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "ancestors": reference.pack_ancestors(torch.stack([mask for mask, _ in trees])),
        "depths": torch.stack([depths for _, depths in trees]),
        "prefix_lengths": prefix,
        "scale": head_dim**-0.5,
    }
    values = {
        "first_valid": torch.tensor([rng.randint(0, int(n)) for n in prefix], dtype=torch.int32),
        "window": rng.choice([1, 5, 64, 100]),
        "softcap": rng.choice([0.5, 30.0]),
        "sinks": torch.randn(kv_heads * group, generator=generator),
    }
    return arguments | {name: values[name] for name in options}


def assert_equals_reference(kernels, arguments: dict) -> None:
    reference, kernel = kernels
    is_real = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()  # noqa: E731
    exact = {name: value.double() if is_real(value) else value for name, value in arguments.items()}
    for name in ("key", "value"):
        exact[name] = exact[name].nan_to_num(0.0)
    expected = reference.tree_attention_reference(**exact)
    output = kernel.tree_attention(**arguments)
    assert output.dtype == arguments["query"].dtype
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[output.dtype], float(error)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel allocates holds NaN, so that an entry nobody writes is seen."""

    def new_empty(self, *size, dtype=None):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return torch.full(size, torch.nan, dtype=dtype or self.dtype, device=self.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


CASES = [(), *((name,) for name in OPTIONS), OPTIONS]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "bare")
def test_equals_the_reference(kernels, options, seed):
    assert_equals_reference(kernels, random_case(kernels[0], seed, options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_low_precision(kernels, dtype, seed):
    assert_equals_reference(kernels, random_case(kernels[0], seed, OPTIONS, dtype))


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 192, "value_dim": 128, "n_nodes": 5},
        {"head_dim": 256, "value_dim": 256, "n_nodes": 3},
        {"head_dim": 40, "value_dim": 24, "n_nodes": 9},
        {"head_dim": 32, "value_dim": 32, "n_nodes": 200},
    ],
    ids=str,
)
def test_shapes_of_real_models(kernels, shape):
    assert_equals_reference(kernels, random_case(kernels[0], 0, (), **shape))


def test_a_node_that_sees_nothing_gets_zeros(kernels):
    arguments = random_case(kernels[0], 1, ())
    arguments["ancestors"] = torch.zeros_like(arguments["ancestors"])
    arguments["prefix_lengths"] = torch.zeros_like(arguments["prefix_lengths"])
    assert (kernels[1].tree_attention(**arguments) == 0).all()
