"""Attention over a tree: what the Triton kernel and PyTorch's attention cost, and what verifying a tree costs a model.

    python examples/attention_speed.py                       # on a GPU: a few minutes
    python examples/attention_speed.py --device cpu          # grouped query heads against transformers' sdpa

On a GPU: the kernel's error against fp64, then median milliseconds per call, methods in turns, with the bandwidth at which
the keys and values are read, the bandwidth of a copy on the same device, and the memory a call allocates; then the time of
a forward over n nodes of an 8B-shaped random model as a multiple of that over one. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.attention import grouped_attention
from hf_ddtree.kernels.reference import pack_ancestors, tree_attention_reference, visible_keys
from hf_ddtree.verify import tree_verifier

SHAPES_OF_MODELS = {  # query heads, KV heads, head dim
    "8b": (32, 8, 128),
    "smollm2": (9, 3, 64),
    "tiny": (4, 2, 32),
}
MODELS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    },
}
BRANCHING = 3  # of the trees: as wide as good drafters make them at budget 64
LARGEST_REFERENCE = 2**27  # scores, of which fp64 takes a gigabyte at a time
WARM_UP = 3  # calls before those that count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES_OF_MODELS)
    parser.add_argument("--nodes", type=int, nargs="+", help="N, the root included")
    parser.add_argument("--lengths", type=int, nargs="+", help="committed tokens")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--model", choices=MODELS, help="of the verification times; on a GPU the default is 8b")
    parser.add_argument("--kernel", action="store_true", help="also without a GPU, in Triton's interpreter")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    shapes = options.shapes or (["8b"] if on_gpu else ["8b", "smollm2"])
    nodes = options.nodes or ([16, 64, 256, 1024] if on_gpu else [9, 17, 33, 65])
    lengths = options.lengths or ([1024, 4096, 16384, 65536] if on_gpu else [256, 2048])
    dtypes = options.dtypes or (["bfloat16"] if on_gpu else ["bfloat16", "float32"])
    model, use_kernel = options.model or ("8b" if on_gpu else None), on_gpu or options.kernel

    torch.manual_seed(0)
    results = {"environment": environment(options.device), "attention": [], "verify": []}
    if on_gpu:
        results["copy_gb_per_s"] = copy_bandwidth(options.device, options.repeats)
        print(f"copy: {results['copy_gb_per_s']:.0f} GB/s")
    for shape in shapes:
        for dtype in dtypes:
            for n_nodes in nodes:
                for length in lengths:
                    row = {"shape": shape, "dtype": dtype, "nodes": n_nodes, "length": length}
                    row |= measure_attention(row, options.device, use_kernel, options.repeats)
                    results["attention"].append(row)
                    print(json.dumps(row), flush=True)
    if model is not None:
        for length in lengths[:3]:
            row = {"model": model, "length": length}
            row |= verify_times(model, length, [1, *nodes], options.device, dtypes[0], use_kernel, options.repeats)
            results["verify"].append(row)
            print(json.dumps(row), flush=True)
    print(json.dumps(results))


def environment(device: str) -> dict:
    """What the figures depend on."""
    found = {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        import triton

        found |= {"card": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "triton": triton.__version__}
    return found


def measure_attention(row: dict, device: str, use_kernel: bool, repeats: int) -> dict:
    """Median milliseconds of each method, and for the kernel its error, bandwidth and memory."""
    n_heads, n_kv_heads, head_dim = SHAPES_OF_MODELS[row["shape"]]
    dtype, n_nodes, length = getattr(torch, row["dtype"]), row["nodes"], row["length"]
    query = torch.randn(1, n_nodes, n_heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(1, n_kv_heads, length + n_nodes, head_dim, device=device, dtype=dtype) for _ in range(2))
    tree = wide_tree(n_nodes)
    ancestors = pack_ancestors(tree.ancestor_mask[None]).to(device)
    depths = tree.depths[None].to(device, torch.int32)
    prefix = torch.tensor([length], dtype=torch.int32, device=device)
    visible = visible_keys(ancestors, depths, prefix, length + n_nodes)[:, None]
    mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    scale, layer = head_dim**-0.5, SimpleNamespace(num_key_value_groups=n_heads // n_kv_heads, is_causal=True)
    methods = {
        "sdpa": lambda: sdpa_attention_forward(layer, query, key, value, mask, scaling=scale),
        "grouped": lambda: grouped_attention(query, key, value, mask, scale),
    }
    found = {}
    if use_kernel:
        from hf_ddtree.kernels.tree_attention import tree_attention

        arguments = (query, key, value, ancestors, depths, prefix, scale)
        methods["triton"] = lambda: tree_attention(*arguments)
        if n_heads * n_nodes * length <= LARGEST_REFERENCE:
            exact = tree_attention_reference(query.double(), key.double(), value.double(), *arguments[3:])
            found["error"] = float((tree_attention(*arguments).double() - exact).abs().max() / exact.abs().max())
    if device.startswith("cuda") and n_nodes <= 64:  # every size is compiled anew
        flex = torch.compile(flex_attention)
        score = lambda score, b, h, node, key_index: score + mask[0, 0, node, key_index]  # noqa: E731
        methods["flex"] = lambda: flex(query, key, value, score_mod=score, scale=scale, enable_gqa=True)
    methods = {name: method for name, method in methods.items() if runs(method)}
    found["ms"] = medians(methods, device, repeats)
    if "triton" in found["ms"]:
        found["gb_per_s"] = 2 * key.numel() * key.element_size() / found["ms"]["triton"] / 1e6
        found["speedup"] = found["ms"]["sdpa"] / found["ms"]["triton"]
    if device.startswith("cuda"):
        found["mb_allocated"] = {name: megabytes(method) for name, method in methods.items()}
    return found


def wide_tree(n_nodes: int) -> DraftTree:
    """Every node has up to `BRANCHING` children."""
    return DraftTree.from_lists([0] * n_nodes, [-1, *((node - 1) // BRANCHING for node in range(1, n_nodes))])


def runs(method) -> bool:
    """Whether the method works on this device at all."""
    try:
        method()
    except Exception as error:  # noqa: BLE001 (compilers raise anything; a method that fails is left out and named)
        print(f"left out: {str(error)[:200]}")
        return False
    return True


def medians(methods: dict, device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds per call, the methods in turns."""
    seconds = {name: [] for name in methods}
    for turn in range(WARM_UP + repeats):
        for name, method in methods.items():
            seconds[name].append(timed(method, device))
    return {name: 1e3 * statistics.median(values[WARM_UP:]) for name, values in seconds.items()}


def timed(method, device: str) -> float:
    """Seconds of one call."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        method()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    method()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def megabytes(method) -> float:
    """What a call allocates at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_bandwidth(device: str, repeats: int) -> float:
    """Gigabytes per second that a copy of 1 GiB reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / medians({"copy": lambda: target.copy_(source)}, device, repeats)["copy"] / 1e6


@torch.inference_mode()
def verify_times(name: str, length: int, nodes: list[int], device: str, dtype: str, use_kernel: bool, repeats: int) -> dict:
    """Median milliseconds of verifying n nodes, and as multiples of one node, with and without the kernel."""
    config = AutoConfig.for_model("llama", **MODELS[name])
    with torch.device(device):
        model = hf_ddtree.enable(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))).eval()
    found = {}
    for method, kernel in {"sdpa": False, "triton": True}.items():
        if kernel and not use_kernel:
            continue
        cache = DynamicCache(config=config)
        prompt = torch.randint(config.vocab_size, (1, length), device=device)
        model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
        inputs = {"cache": cache, "attention_mask": None, "use_cache": True}
        inputs["position_ids"] = torch.tensor([[length]], device=device)
        with tree_verifier(model, cache, kernel) as verifier:

            def round_of(n_nodes, verifier=verifier, inputs=inputs):
                verifier.verify_tree(wide_tree(n_nodes), inputs)
                verifier.cache.crop(-n_nodes)

            rounds = {n: lambda n=n: round_of(n) for n in nodes}
            ms = medians(rounds, device, repeats)
        found[method] = {"ms": ms, "relative": {n: ms[n] / ms[nodes[0]] for n in nodes}}
    return found


if __name__ == "__main__":
    main()
