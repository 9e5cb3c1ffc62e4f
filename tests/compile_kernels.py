"""Compile the tree-attention kernel ahead of time, without a GPU: `python tests/compile_kernels.py`.

The script prints one line of JSON per target and shape: registers per thread, bytes of shared memory, and bytes of
registers spilled.
"""

import json
import re
import subprocess
import tempfile

import triton
from hf_ddtree.kernels.tree_attention import BLOCK_N, _tree_attention, launch_options
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
# dtype, rows per KV head, query heads per KV head, head dims, options of the layer
SHAPES = [
    ("bf16", 260, 4, 128, 128, ()),  # llama 3, qwen3
    ("bf16", 4, 4, 128, 128, ()),  # the same for a lone root
    ("fp16", 520, 8, 64, 64, ("HAS_WINDOW",)),  # gpt_oss
    ("bf16", 65, 1, 192, 128, ()),  # deepseek_v3
    ("bf16", 130, 2, 256, 256, ("HAS_WINDOW", "HAS_SOFTCAP")),  # gemma 2
    ("fp32", 195, 3, 64, 64, ("HAS_FIRST",)),  # smollm2
    ("fp32", 260, 4, 128, 128, ()),
]


def compiled(target: GPUTarget, dtype: str, n_rows: int, group: int, head_dim: int, value_dim: int, flags: tuple):
    """Return the kernel for one target and shape. Numbers of keys are unknown, and strides are multiples of 16."""
    options = launch_options(n_rows, head_dim, value_dim, ELEMENT_SIZE[dtype])
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        **options,
        **{"GROUP": group, "D": head_dim, "DV": value_dim, "BLOCK_N": BLOCK_N, "UPCAST": False},
        **{flag: flag in flags for flag in ("HAS_FIRST", "HAS_WINDOW", "HAS_SOFTCAP")},
        **dict.fromkeys(("q_stride_d", "k_stride_d", "v_stride_d"), 1),
    }
    if "HAS_FIRST" not in flags:
        constants["first_ptr"] = None
    kinds = {name: f"*{dtype}" for name in ("q_ptr", "k_ptr", "v_ptr")}
    kinds |= {"acc_ptr": "*fp32", "stats_ptr": "*fp32", "ancestors_ptr": "*i64", "scale": "fp32", "softcap": "fp32"}
    kinds |= dict.fromkeys(("depths_ptr", "prefix_ptr", "first_ptr"), "*i32")
    names = _tree_attention.arg_names
    aligned = [name for name in names if name not in constants and (name.endswith("_ptr") or "_stride_" in name)]
    source = ASTSource(
        fn=_tree_attention,
        signature={name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=target, options=launch)


def resources(kernel, target: GPUTarget) -> dict[str, int]:
    """Return the registers per thread and the bytes spilled that the assembler reports."""
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        return {
            "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
            "spilled": 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        }
    arch = "sm_90a" if target.arch == 90 else f"sm_{target.arch}"
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [get_ptxas(target.arch).path, "-v", "--gpu-name", arch, file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", report)[1]),
    }


def main() -> None:
    """Compile every shape for every target, and print what each takes."""
    for name, target in TARGETS.items():
        for shape in SHAPES:
            kernel = compiled(target, *shape)
            row = {"target": name, "shape": shape, "shared": kernel.metadata.shared, **resources(kernel, target)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
