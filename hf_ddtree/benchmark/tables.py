"""Markdown tables of a benchmark's rows, one table per temperature."""

from collections.abc import Iterable
from itertools import chain

import numpy as np

from .rows import Row, grouped, rows_of_pass
from .stages import FORWARDS, STAGES
from .summary import Summary, speedups, stage_times, summarize

SPEED_COLUMNS = (
    "method",
    "speedup (95%)",
    "tokens/s",
    "tokens per round",
    "drafted nodes",
    "equal to plain",
    "largest gap",
)


def markdown_table(caption: str, columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table under its caption, with an empty line at the end.

    Args:
        caption: what the table shows.
        columns: the column headers.
        lines: the cells of each line.
    """
    columns = list(columns)
    head = [f"{caption}:\n", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in lines), ""])


def speed_table(rows: list[Row]) -> str:
    """Return the speed, acceptance and exactness of every method.

    Args:
        rows: rows of any pass.
    """
    return "\n".join(
        markdown_table(
            f"Temperature {temperature:g}",
            SPEED_COLUMNS,
            ([name, *_speed_cells(summary, greedy=temperature == 0)] for name, summary in methods.items()),
        )
        for temperature, methods in summarize(rows).items()
    )


def _speed_cells(summary: Summary, greedy: bool) -> list[str]:
    s = summary
    all_equal = s.n_equal == s.n_prompts
    return [
        f"{s.speedup:.2f} ({s.low:.2f}-{s.high:.2f})",
        f"{s.tokens_per_second:.1f}",
        "-" if s.tokens_per_round is None else f"{s.tokens_per_round:.2f}",
        "-" if s.tree_size is None else f"{s.tree_size:.1f}",
        f"{s.n_equal}/{s.n_prompts}" if greedy else "-",
        "-" if all_equal else f"{s.gap:.3g} ({s.gap_ulps:.3g} ulp)",
    ]


def baseline_table(rows: list[Row]) -> str:
    """Return the median speedup of every tree over each method without a tree.

    Args:
        rows: rows of any pass.
    """
    rows = rows_of_pass(rows, "speed")
    trees = list(dict.fromkeys(row["method"] for row in rows if row["tree_budget"] is not None))
    baselines = list(dict.fromkeys(row["method"] for row in rows if row["tree_budget"] is None))
    ratios = {baseline: speedups(rows, baseline) for baseline in baselines}

    def median(temperature: float, tree: str, baseline: str) -> str:
        return f"{np.median(list(chain.from_iterable(ratios[baseline][temperature, tree].values()))):.2f}"

    return "\n".join(
        markdown_table(
            f"Speedup over each baseline, temperature {temperature:g}",
            ["method", *baselines],
            [[tree, *(median(temperature, tree, baseline) for baseline in baselines)] for tree in trees],
        )
        for temperature in grouped(rows)
    )


def kind_table(rows: list[Row]) -> str:
    """Return the median speedup over plain generate by kind of prompt.

    Args:
        rows: rows of any pass.
    """
    rows = rows_of_pass(rows, "speed")
    ratios = speedups(rows)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))

    def median(temperature: float, method: str, kind: str) -> str:
        values = ratios[temperature, method][kind]
        return f"{np.median(values):.2f}" if values else "-"

    return "\n".join(
        markdown_table(
            f"Speedup by kind of prompt, temperature {temperature:g}",
            ["method", *kinds],
            [[method, *(median(temperature, method, kind) for kind in kinds)] for method in methods],
        )
        for temperature, methods in grouped(rows).items()
    )


def stage_table(rows: list[Row]) -> str:
    """Return the milliseconds per round by stage.

    Args:
        rows: rows of any pass.
    """
    names = ("round", *STAGES, *FORWARDS, "host")
    return "\n".join(
        markdown_table(
            f"Milliseconds per round, temperature {temperature:g}",
            ["method", *names],
            [[method, *(f"{times[name]:.2f}" for name in names)] for method, times in methods.items()],
        )
        for temperature, methods in stage_times(rows).items()
    )
