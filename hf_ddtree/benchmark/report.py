"""What a run prints and draws."""

from transformers import PreTrainedModel

from .plots import save_plots
from .rows import Row
from .tables import baseline_table, kind_table, speed_table, stage_table
from .verify_cost import save_cost_plot, target_cost, verify_cost_table


def print_report(rows: list[Row], output: str | None) -> None:
    """Print the tables, and write the plots.

    Args:
        rows: the rows of the run.
        output: the prefix of the plots' names, or None for no plots.
    """
    print("\n".join(table(rows) for table in (speed_table, baseline_table, kind_table, stage_table)))
    if output is not None:
        print("\n".join(save_plots(rows, output)))


def print_verify_cost(target: PreTrainedModel, output: str | None) -> None:
    """Print the verification cost that the automatic budget uses, and draw it.

    Args:
        target: the target of the run.
        output: the prefix of the plot's name, or None for no plot.
    """
    cost = target_cost(target)
    print(verify_cost_table(cost))
    if output is not None:
        file = f"{output}-verify_cost.png"
        save_cost_plot(cost, file)
        print(file)
