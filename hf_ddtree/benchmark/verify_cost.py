"""The verification cost that the automatic budget uses for a target, as a table and a plot."""

import numpy as np
from transformers import DynamicCache, PreTrainedModel

from ..budget.cost import VerifyCost, convex_below
from ..budget.store import verify_cost
from ..target.attention import text_config
from ..target.kernel_attention import choose_attention
from ..target.path_verifier import is_path_by_path
from .tables import markdown_table


def target_cost(target: PreTrainedModel) -> VerifyCost:
    """Return C_verify as `generate` uses it for a target.

    Args:
        target: the target on its device.
    """
    path_by_path = is_path_by_path(target, DynamicCache(config=text_config(target)))
    attention = choose_attention(target, "auto", target.device, None, path_by_path)
    return verify_cost(target, target.device, attention)


def verify_cost_table(cost: VerifyCost) -> str:
    """Return a Markdown table: measured milliseconds and the convex function below them, by nodes and length.

    Args:
        cost: C_verify.
    """
    names = [f"{kind}, {length} tokens" for length in cost.lengths for kind in ("measured", "convex")]
    columns = [values for row in cost.measured for values in (row, convex_below(cost.sizes, row))]
    lines = [
        [str(n_nodes), *(f"{1000 * value:.1f}" for value in values)]
        for n_nodes, *values in zip(cost.sizes, *columns, strict=True)
    ]
    return markdown_table("Milliseconds of verifying n nodes, the root included", ["n", *names], lines)


def save_cost_plot(cost: VerifyCost, file: str) -> None:
    """Draw C_verify in multiples of the cost of one node.

    Args:
        cost: C_verify.
        file: the name of the PNG file.
    """
    from matplotlib.figure import Figure  # imported here, because only plots need it

    figure = Figure(figsize=(5.5, 4.2), layout="constrained", dpi=150)
    axis = figure.subplots()
    nodes = np.arange(1, cost.sizes[-1] + 1)
    for length, row in zip(cost.lengths, cost.measured, strict=True):
        one_node = cost.seconds(1, length)
        (line,) = axis.plot(nodes, cost.seconds(nodes, length) / one_node, label=f"{length} tokens")
        axis.plot(cost.sizes, np.array(row) / one_node, "o", color=line.get_color(), markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("verified nodes, the root included")
    axis.set_ylabel("time of the forward (multiples of one node's)")
    axis.set_ylim(bottom=0)
    axis.grid(True, alpha=0.3)
    axis.legend(title="committed length")
    figure.savefig(file)
