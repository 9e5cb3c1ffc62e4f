"""What the automatic budget believes verification to cost, as a table and a plot."""

import numpy as np
from transformers import DynamicCache, PreTrainedModel

from ..attention import choose_kernel
from ..cost import VerifyCost, convex_below, verify_cost
from ..verify import is_path_by_path


def target_cost(target: PreTrainedModel) -> VerifyCost:
    """C_verify as `generate` uses it for this target."""
    path_by_path = is_path_by_path(target, DynamicCache(config=target.config.get_text_config(decoder=True)))
    use_kernel = choose_kernel(target, "auto", target.device, {"attention_mask": None}, path_by_path)
    return verify_cost(target, target.device, use_kernel)


def cost_table(cost: VerifyCost) -> str:
    """A Markdown table: measured milliseconds and the convex function below them, by nodes and committed tokens."""
    names = [f"{kind}, {length} tokens" for length in cost.lengths for kind in ("measured", "convex")]
    parts = ["Milliseconds of verifying n nodes, the root included:\n", f"| n | {' | '.join(names)} |"]
    parts.append(f"|---|{'---|' * len(names)}")
    columns = [values for row in cost.measured for values in (row, convex_below(cost.sizes, row))]
    for n_nodes, *values in zip(cost.sizes, *columns):
        parts.append(f"| {n_nodes} | {' | '.join(f'{1000 * value:.1f}' for value in values)} |")
    return "\n".join([*parts, ""])


def save_cost_plot(cost: VerifyCost, file: str) -> None:
    """Draw what the table says, relative to one node."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4.2), layout="constrained", dpi=150)
    axis = figure.subplots()
    nodes = np.arange(1, cost.sizes[-1] + 1)
    for length, row in zip(cost.lengths, cost.measured):
        (line,) = axis.plot(nodes, cost.seconds(nodes, length) / cost.seconds(1, length), label=f"{length} tokens")
        axis.plot(cost.sizes, np.array(row) / cost.seconds(1, length), "o", color=line.get_color(), markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("nodes verified, the root included")
    axis.set_ylabel("time of the forward (multiples of one node's)")
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend(title="after")
    figure.savefig(file)
