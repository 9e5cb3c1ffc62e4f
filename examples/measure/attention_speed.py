"""What does attention over a tree cost? Time the Triton kernel and PyTorch's attention, and the forward of a model.

    python examples/measure/attention_speed.py                # on a GPU: a few minutes
    python examples/measure/attention_speed.py --device cpu   # grouped query heads against transformers' sdpa

The script prints one JSON line per measurement, and all of them in the last line. Times are median milliseconds per
call, and the methods take turns.

On a GPU it first measures the attention of one layer: the kernel's error against fp64, the time of each method, the
bandwidth at which the keys and values are read beside that of a copy, and the memory that a call allocates. It then
measures the forward over n nodes of a random model of 8B shape, also as a multiple of the forward over one node.
"""

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hf_ddtree.kernels.reference import pack_ancestors, tree_attention_reference, visible_keys
from timers import allocated_megabytes, copy_bandwidth, median_milliseconds
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verify_speed import MODELS, verify_times, wide_tree

from hf_ddtree.target.attention import grouped_attention

SHAPES = {  # query heads, KV heads, head dim
    "8b": (32, 8, 128),
    "smollm2": (9, 3, 64),
    "tiny": (4, 2, 32),
}
MAX_REFERENCE_SCORES = 2**27  # more scores would take the fp64 reference more than a gigabyte at a time
MAX_FLEX_NODES = 64  # flex attention is compiled for every size, which takes long
N_VERIFIED_LENGTHS = 3  # the shortest lengths are also measured with the model


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the results.

    Args:
        arguments: the command line without the program's name. None means `sys.argv[1:]`.
    """
    options = parse_options(arguments)
    device = torch.device(options.device)
    torch.manual_seed(0)
    results: dict[str, Any] = {"environment": environment(device), "attention": [], "verify": []}
    if device.type == "cuda":
        results["copy_gb_per_s"] = copy_bandwidth(device, options.repeats)
        print(f"copy: {results['copy_gb_per_s']:.0f} GB/s")
    for shape in options.shapes:
        for dtype in options.dtypes:
            for n_nodes in options.nodes:
                for length in options.lengths:
                    row = {"shape": shape, "dtype": dtype, "nodes": n_nodes, "length": length}
                    row |= attention_figures(row, device, options.kernel, options.repeats)
                    results["attention"].append(row)
                    print(json.dumps(row), flush=True)
    if options.model is not None:
        dtype = getattr(torch, options.dtypes[0])
        for length in options.lengths[:N_VERIFIED_LENGTHS]:
            nodes = [1, *options.nodes]
            times = verify_times(options.model, length, nodes, device, dtype, options.kernel, options.repeats)
            results["verify"].append({"model": options.model, "length": length, **times})
            print(json.dumps(results["verify"][-1]), flush=True)
    print(json.dumps(results))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to measure")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="shapes of the attention layer")
    parser.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes, the root included")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of committed tokens")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], help="of keys and values")
    parser.add_argument("--model", choices=MODELS, help="the model whose forward is timed (default: 8b on a GPU)")
    parser.add_argument("--kernel", action="store_true", help="time the kernel in Triton's interpreter without a GPU")
    parser.add_argument("--repeats", type=int, default=30, help="calls that count")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    options.shapes = options.shapes or (["8b"] if on_gpu else ["8b", "smollm2"])
    options.nodes = options.nodes or ([16, 64, 256, 1024] if on_gpu else [9, 17, 33, 65])
    options.lengths = options.lengths or ([1024, 4096, 16384, 65536] if on_gpu else [256, 2048])
    options.dtypes = options.dtypes or (["bfloat16"] if on_gpu else ["bfloat16", "float32"])
    options.model = options.model or ("8b" if on_gpu else None)
    options.kernel = options.kernel or on_gpu
    return options


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    found = {"device": str(device), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        import triton

        found |= {"card": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "triton": triton.__version__}
    return found


class LayerInputs:
    """Random inputs of one attention layer over a wide tree.

    Args:
        row: "shape", "dtype", "nodes" and "length" of the measurement.
        device: where the tensors live.
    """

    def __init__(self, row: dict[str, Any], device: torch.device):
        n_heads, n_kv_heads, head_dim = SHAPES[row["shape"]]
        dtype, n_nodes, length = getattr(torch, row["dtype"]), row["nodes"], row["length"]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = torch.randn(1, n_nodes, n_heads, head_dim, **options).transpose(1, 2)
        self.key, self.value = (torch.randn(1, n_kv_heads, length + n_nodes, head_dim, **options) for _ in range(2))
        tree = wide_tree(n_nodes)
        # what the kernel gets in place of a mask
        self.ancestors = pack_ancestors(tree.ancestor_mask[None]).to(device)
        self.depths = tree.depths[None].to(device, torch.int32)
        self.prefix = torch.tensor([length], dtype=torch.int32, device=device)
        visible = visible_keys(self.ancestors, self.depths, self.prefix, length + n_nodes)[:, None]
        self.mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        self.scale, self.n_scores = head_dim**-0.5, n_heads * n_nodes * length
        self.module = SimpleNamespace(num_key_value_groups=n_heads // n_kv_heads, is_causal=True)


def attention_figures(row: dict[str, Any], device: torch.device, use_kernel: bool, repeats: int) -> dict[str, Any]:
    """Return the median milliseconds of each method, and for the kernel its error, bandwidth and memory.

    Args:
        row: "shape", "dtype", "nodes" and "length" of the measurement.
        device: where to measure.
        use_kernel: whether to time the Triton kernel, too.
        repeats: the calls that count.
    """
    inputs = LayerInputs(row, device)
    methods = pytorch_methods(inputs)
    found: dict[str, Any] = {}
    if use_kernel:
        methods["triton"] = kernel_method(inputs)
        if inputs.n_scores <= MAX_REFERENCE_SCORES:
            found["error"] = relative_error(inputs, methods["triton"]())
    methods = {name: method for name, method in methods.items() if runs(name, method)}
    found["ms"] = median_milliseconds(methods, device, repeats)
    if "triton" in found["ms"]:
        found["gb_per_s"] = 2 * inputs.key.numel() * inputs.key.element_size() / found["ms"]["triton"] / 1e6
        found["speedup"] = found["ms"]["sdpa"] / found["ms"]["triton"]
    if device.type == "cuda":
        found["mb_allocated"] = {name: allocated_megabytes(method) for name, method in methods.items()}
    return found


def pytorch_methods(inputs: LayerInputs) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's ways to attend under a mask, by name."""
    query, key, value, mask, scale = inputs.query, inputs.key, inputs.value, inputs.mask, inputs.scale
    methods: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa_attention_forward(inputs.module, query, key, value, mask, scaling=scale),
        "grouped": lambda: grouped_attention(query, key, value, mask, scale),
    }
    if query.is_cuda and query.shape[2] <= MAX_FLEX_NODES:
        flex = torch.compile(flex_attention)

        def add_mask(score, batch, head, node, key_index):
            return score + mask[0, 0, node, key_index]

        methods["flex"] = lambda: flex(query, key, value, score_mod=add_mask, scale=scale, enable_gqa=True)
    return methods


def kernel_method(inputs: LayerInputs) -> Callable[[], torch.Tensor]:
    """Return a function that attends by the Triton kernel."""
    from hf_ddtree.kernels.tree_attention import tree_attention  # needs Triton

    i = inputs
    return lambda: tree_attention(i.query, i.key, i.value, i.ancestors, i.depths, i.prefix, i.scale)


def relative_error(inputs: LayerInputs, output: torch.Tensor) -> float:
    """Return the largest error of an output against the fp64 reference, relative to its largest entry."""
    i = inputs
    query, key, value = i.query.double(), i.key.double(), i.value.double()
    exact = tree_attention_reference(query, key, value, i.ancestors, i.depths, i.prefix, i.scale)
    return float((output.double() - exact).abs().max() / exact.abs().max())


def runs(name: str, method: Callable[[], Any]) -> bool:
    """Return whether a method works on this device, and report why if it does not."""
    try:
        method()
    except Exception as error:  # compilers raise errors of any type
        print(f"{name} is left out: {str(error)[:200]}")
        return False
    return True


if __name__ == "__main__":
    main()
