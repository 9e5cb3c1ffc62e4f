"""Write the tables of model families in README.md and docs/targets.md from what the tests run: `make docs`.

With `--check`, only say whether they are current.
"""

import re
import sys
from pathlib import Path

from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from hf_ddtree._transformers import uses_attention_interface
from hf_ddtree.target.attention import text_config
from hf_ddtree.target.gated_delta import gated_delta_patches
from hf_ddtree.target.masks import layer_window
from hf_ddtree.target.path_verifier import is_path_by_path
from hf_ddtree.testing import ALL_FAMILIES, INCONSISTENT_FAMILIES, tiny_model

ROOT = Path(__file__).parents[1]
# page -> the columns of its table
PAGES = {
    ROOT / "docs" / "targets.md": ("layers", "verified", "kernel", "`model_type`"),
    ROOT / "README.md": ("layers", "`model_type`"),
}
START, END = "<!-- `make docs` writes this table. Do not edit it. -->\n", "<!-- end of the table -->"
# entries that are a variant of a model type
VARIANTS = {
    "falcon_grouped": "`falcon` with `new_decoder_architecture`",
    "gemma3n_shared": "`gemma3n_text` with `num_kv_shared_layers`",
    "gemma4_experts": "`gemma4_text` with `enable_moe_block`",
    "gemma4_shared": "`gemma4_text` with `num_kv_shared_layers`",
    "qwen3_windowed": "`qwen3` with `use_sliding_window`",
}
LAYERS = (
    "full attention",
    "a sliding window in every layer",
    "full and sliding-window attention",
    "Gated DeltaNet and full attention",
    "other recurrent or convolutional layers beside attention",
)


def main() -> int:
    """Write the tables, or check them; return the exit status."""
    logging.set_verbosity_error()
    kinds = {family: describe(tiny_model(family)) for family in ALL_FAMILIES.keys() - INCONSISTENT_FAMILIES.keys()}
    for path, columns in PAGES.items():
        page = path.read_text(encoding="utf-8")
        block = START + table(kinds, columns) + END
        current = re.sub(f"{re.escape(START)}.*?{re.escape(END)}", block, page, flags=re.DOTALL)
        if "--check" not in sys.argv[1:]:
            path.write_text(current, encoding="utf-8")
        elif current != page:
            print(f"The table of families in {path.name} is not current. Run `make docs`.", file=sys.stderr)
            return 1
    return 0


def table(kinds: dict[str, tuple[str, ...]], columns: tuple[str, ...]) -> str:
    """Return a table of the families, one row per kind.

    Args:
        kinds: what `describe` says of each family.
        columns: the titles. The last column holds the families, and those before it are the first fields of a kind.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, kind in kinds.items():
        rows.setdefault(kind[: len(columns) - 1], []).append(VARIANTS.get(family, f"`{family}`"))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for kind in sorted(rows, key=lambda kind: (LAYERS.index(kind[0]), *kind[1:])):
        lines.append(f"| {' | '.join((*kind, ', '.join(sorted(rows[kind]))))} |")
    return "\n".join(lines) + "\n"


def describe(model: PreTrainedModel) -> tuple[str, str, str]:
    """Return what the layers of a model are, how a tree is verified in them, and whether the kernel can do it."""
    config = text_config(model)
    path_by_path = is_path_by_path(model, DynamicCache(config=config))
    windows = {layer_window(config, layer) is not None for layer in range(config.num_hidden_layers)}
    if path_by_path:
        layers = LAYERS[4]
    elif gated_delta_patches(model):
        layers = LAYERS[3]
    else:
        layers = LAYERS[2] if len(windows) == 2 else LAYERS[int(True in windows)]
    kernel = uses_attention_interface(model) and not path_by_path
    return layers, "path by path" if path_by_path else "in one forward", "yes" if kernel else "no"


if __name__ == "__main__":
    raise SystemExit(main())
