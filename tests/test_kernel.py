"""The Triton kernel against its fp64 reference, in Triton's interpreter; and compiled for GPUs that need not be there."""

import copy
import json
import os
import random
import runpy
import subprocess
import sys

import accelerate
import pytest
import torch
from helpers import ROOT

pytest.importorskip("triton", reason="needs triton, which `make test` installs on Linux; there is none for macOS")

import hf_ddtree  # noqa: E402
from hf_ddtree.kernels.reference import pack_ancestors, tree_attention_reference  # noqa: E402
from hf_ddtree.kernels.tree_attention import tree_attention  # noqa: E402
from hf_ddtree.testing import VOCAB_SIZE, ScriptedDrafter, tiny_model  # noqa: E402

OPTIONS = ("first_valid", "window", "softcap", "sinks")
# relative to the largest entry: sums of some hundred products in fp32; bf16 and fp16 round inputs and output
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random_tree(rng: random.Random, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
    for node in range(n):
        if node:
            parent = rng.randrange(node)
            mask[node], depths[node] = mask[parent], depths[parent] + 1
        mask[node, node] = True
    return mask, depths


def random_case(seed: int, options: tuple[str, ...], dtype=torch.float32, **shape):
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


def assert_equals_reference(arguments: dict) -> None:
    is_real = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()  # noqa: E731
    exact = {name: value.double() if is_real(value) else value for name, value in arguments.items()}
    for name in ("key", "value"):
        exact[name] = exact[name].nan_to_num(0.0)
    expected = tree_attention_reference(**exact)
    output = tree_attention(**arguments)
    assert output.dtype == arguments["query"].dtype
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[output.dtype], float(error)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel allocates holds NaN, so that an entry nobody writes is seen."""

    original = torch.Tensor.new_empty

    def new_empty(*args, **kwargs):
        tensor = original(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


CASES = [(), *((name,) for name in OPTIONS), OPTIONS]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "bare")
def test_equals_the_reference(options, seed):
    assert_equals_reference(random_case(seed, options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_low_precision(dtype, seed):
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
def test_shapes_of_real_models(shape):
    assert_equals_reference(random_case(0, (), **shape))


def test_a_node_that_sees_nothing_gets_zeros():
    arguments = random_case(1, ())
    arguments["ancestors"] = torch.zeros_like(arguments["ancestors"])
    arguments["prefix_lengths"] = torch.zeros_like(arguments["prefix_lengths"])
    assert (tree_attention(**arguments) == 0).all()


# a window, sinks, soft caps, keys and values of different widths, padding
@pytest.mark.parametrize("family", ["llama", "qwen3_windowed", "gemma2", "gpt_oss", "deepseek_v3"])
def test_generates_what_plain_generate_does(family, monkeypatch):
    calls = []

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return tree_attention(*args, **kwargs)

    monkeypatch.setattr("hf_ddtree.kernels.tree_attention.tree_attention", spy)
    model = hf_ddtree.enable(tiny_model(family))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, VOCAB_SIZE, (1, 24), generator=generator)
    padded = {"input_ids": prompt, "attention_mask": (torch.arange(24) >= 20)[None].long()}
    for inputs in ({"input_ids": prompt}, padded):
        settings = {**inputs, "max_new_tokens": 12, "do_sample": False}
        plain = model.generate(**settings)
        drafter = ScriptedDrafter(plain[0].tolist(), seed=1)
        tree = model.generate(**settings, assistant_model=drafter, tree_budget=6, tree_attention="triton")
        assert torch.equal(plain, tree)
    n_layers = model.config.num_hidden_layers
    assert len(calls) >= 2 * n_layers and any(call["first_valid"] is not None for call in calls)


@pytest.mark.parametrize(
    "situation, message",
    [("no triton", "pip install triton"), ("no GPU", "CUDA"), ("holes", "attention_mask"), ("own attention", "LlamaFor")],
)
def test_where_the_kernel_cannot_run_it_says_why(situation, message, monkeypatch):
    model = hf_ddtree.enable(tiny_model("llama"))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    if situation == "no triton":
        monkeypatch.setattr("hf_ddtree.attention.find_spec", lambda name: None)
    elif situation == "no GPU":
        monkeypatch.setattr("hf_ddtree.attention._interpreted", lambda: False)
    elif situation == "holes":
        inputs["attention_mask"] = torch.tensor([[1, 0, 1]])
    else:
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(ValueError, match=f'tree_attention="triton": .*{message}'):
        model.generate(**inputs, max_new_tokens=3, tree_budget=4, tree_attention="triton")
    expected = hf_ddtree.disable(copy.deepcopy(model)).generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, tree_budget=4, do_sample=False), expected)


def test_an_offloaded_model_is_not_taken_for_one_on_a_gpu():
    """Its weights are on "meta" while they are not needed."""
    model = hf_ddtree.enable(tiny_model("llama"))
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=10, do_sample=False)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model.generate(prompt, max_new_tokens=10, do_sample=False, tree_budget=4), expected)


def test_the_speed_script_runs(capsys):
    """Sizes that the interpreter can do; the figures mean nothing."""
    script = runpy.run_path(str(ROOT / "examples" / "attention_speed.py"))
    sizes = ["--nodes", "5", "--lengths", "40", "--dtypes", "float32", "--shapes", "tiny", "--model", "tiny"]
    script["main"](["--device", "cpu", "--kernel", "--repeats", "1", *sizes])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    (attention,), (verify,) = results["attention"], results["verify"]
    assert attention["error"] <= TOLERANCE[torch.float32]
    assert set(attention["ms"]) == {"sdpa", "grouped", "triton"}
    assert set(verify["triton"]["relative"]) == {"1", "5"}


def test_compiles_for_gpus_that_are_not_here(capsys, tmp_path):
    """Small enough for the shared memory of consumer cards, and without spills where it was tuned."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    script = ROOT / "tests" / "compile_kernels.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    with capsys.disabled():
        print(f"\n{result.stdout}", end="")
    assert len(rows) == 21
    for row in rows:
        assert row["shared"] <= (64 if row["target"] == "gfx942" else 99) * 1024, row
        assert row["spilled"] == 0 or row["target"] == "gfx942", row
