"""The Triton kernel against its fp64 reference, in Triton's interpreter, and compiled ahead of time without a GPU."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

pytest.importorskip("triton", reason="needs Triton, which does not exist for macOS")

from hf_ddtree.kernels.reference import pack_ancestors, tree_attention_reference
from hf_ddtree.kernels.tree_attention import SHARED_MEMORY, launch_options, tree_attention

OPTIONS = ("first_valid", "window", "softcap", "sinks")
# Relative to the largest entry. fp32 sums some hundred products, and bf16 and fp16 round inputs and output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random_tree(rng: random.Random, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ancestor mask and the depths of a random tree."""
    mask, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
    for node in range(n):
        if node:
            parent = rng.randrange(node)
            mask[node], depths[node] = mask[parent], depths[parent] + 1
        mask[node, node] = True
    return mask, depths


def random_case(seed: int, options: tuple[str, ...], dtype=torch.float32, **shape):
    """Return the arguments of one call. Keys and queries have strides as in a cache, and NaN lies between them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n_batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
    n_nodes = shape.get("n_nodes", rng.choice([1, 2, 7, 33, 70]))
    head_dim = shape.get("head_dim", rng.choice([32, 48, 64, 80]))
    value_dim = shape.get("value_dim", rng.choice([head_dim, 32]))
    lengths = [rng.choice([0, 1, 63, 64, 65, rng.randint(0, 400)]) for _ in range(n_batch)]
    prefix = torch.tensor(lengths, dtype=torch.int32)
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
        "ancestors": pack_ancestors(torch.stack([mask for mask, _ in trees])),
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


def is_real(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def assert_equals_reference(arguments: dict) -> None:
    exact = {name: value.double() if is_real(value) else value for name, value in arguments.items()}
    for name in ("key", "value"):
        exact[name] = exact[name].nan_to_num(0.0)
    expected = tree_attention_reference(**exact)
    output = tree_attention(**arguments)
    assert output.dtype == arguments["query"].dtype
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[output.dtype], float(error)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


CASES = [(), *((name,) for name in OPTIONS), OPTIONS]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "bare")
def test_tree_attention_equals_the_reference(options, seed):
    assert_equals_reference(random_case(seed, options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_tree_attention_equals_the_reference_in_low_precision(dtype, seed):
    assert_equals_reference(random_case(seed, OPTIONS, dtype))


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
def test_tree_attention_equals_the_reference_at_shapes_of_real_models(shape):
    assert_equals_reference(random_case(0, (), **shape))


def test_tree_attention_gives_zeros_to_a_node_that_sees_nothing():
    arguments = random_case(1, ())
    arguments["ancestors"] = torch.zeros_like(arguments["ancestors"])
    arguments["prefix_lengths"] = torch.zeros_like(arguments["prefix_lengths"])
    assert (tree_attention(**arguments) == 0).all()


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_launch_options_fit_the_tree_and_the_shared_memory(head_dim, element_size):
    few, many = (launch_options(n_rows, head_dim, head_dim, element_size) for n_rows in (1, 1000))
    assert few["BLOCK_M"] == 16 <= many["BLOCK_M"], "16 rows are the least that tensor cores multiply"
    for options in (few, many):
        keys_and_values = 2 * 64 * head_dim * element_size
        queries_and_weights = options["BLOCK_M"] * (head_dim + 64) * element_size
        assert options["num_stages"] == 1 or (
            options["num_stages"] * keys_and_values + queries_and_weights <= SHARED_MEMORY
        )


def test_tree_attention_compiles_without_a_gpu(tmp_path):
    """The kernel fits the shared memory of consumer cards, and spills no registers where it was tuned."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    script = ROOT / "tests" / "compile_kernels.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 21
    for row in rows:
        assert row["shared"] <= (64 if row["target"] == "gfx942" else 99) * 1024, row
        assert row["spilled"] == 0 or row["target"] == "gfx942", row
