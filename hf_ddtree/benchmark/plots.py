"""PNG plots of a benchmark's rows, with one panel per temperature."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .methods import PLAIN
from .rows import Row
from .stages import STAGES
from .summary import Summary, stage_times, summarize

if TYPE_CHECKING:  # only plots need matplotlib
    from matplotlib.axes import Axes

AUTO_COLOUR = "#aa3377"
STAGE_COLOURS = ("#4477aa", "#ccbb44", "#228833", "#aa3377")
BASELINE_STYLES = (("#555555", "--"), ("#cc6600", "-."), ("#008080", ":"))


def save_plots(rows: list[Row], prefix: str) -> list[str]:
    """Write PREFIX-tokens_per_round.png, -speedup.png, -stages.png and -acceptance.png, as far as there are rows.

    Args:
        rows: rows of any pass.
        prefix: the prefix of the files' names.

    Returns:
        The names of the files.
    """
    summaries, times = summarize(rows), stage_times(rows)
    plots: dict[str, tuple[dict[float, Any], Callable]] = {
        "tokens_per_round": (summaries, draw_tokens_per_round),
        "speedup": (summaries, draw_speedup),
        "stages": (times, draw_stages),
        "acceptance": (summaries, draw_acceptance),
    }
    names = []
    for name, (panels, draw) in plots.items():
        if panels:
            names.append(f"{prefix}-{name}.png")
            save_panels(panels, draw, names[-1])
    return names


def save_panels(panels: dict[float, Any], draw: Callable[["Axes", Any], None], file: str) -> None:
    """Draw one panel per temperature, with common axes and one legend.

    Args:
        panels: what each panel shows, by temperature.
        draw: draws one panel.
        file: the name of the PNG file.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure in memory

    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 4.2), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    legend: dict[str, Any] = {}
    for axis, (temperature, methods) in zip(axes, panels.items(), strict=True):
        draw(axis, methods)
        axis.set_title(f"temperature {temperature:g}")
        axis.grid(True, alpha=0.3)
        axis.set_axisbelow(True)
        handles, labels = axis.get_legend_handles_labels()
        legend.update(zip(labels, handles, strict=True))
    for axis in axes[1:]:
        axis.set_ylabel("")
    axes[0].set_ylim(bottom=0)  # after all panels are drawn, because it ends the scaling of the common axis
    figure.legend(legend.values(), legend.keys(), loc="outside right center", fontsize="small")
    figure.savefig(file)


def draw_tokens_per_round(axis: "Axes", methods: dict[str, Summary]) -> None:
    """Draw tokens_per_round over the tree budget."""
    _draw_over_budget(axis, methods, lambda summary: summary.tokens_per_round)
    axis.set_ylabel("tokens per round (accepted length + 1)")


def draw_speedup(axis: "Axes", methods: dict[str, Summary]) -> None:
    """Draw the speedup with its interval over the tree budget, and plain generate at 1."""
    _draw_over_budget(axis, methods, lambda summary: summary.speedup)
    trees = _fixed_trees(methods)
    if trees:
        budgets, low, high = zip(*((budget, s.low, s.high) for budget, s in trees), strict=True)
        axis.fill_between(budgets, low, high, alpha=0.2, label="95% interval")
    axis.axhline(1, color="black", linewidth=0.8, label=PLAIN)
    axis.set_ylabel("speedup over plain generate (ratio)")


def _draw_over_budget(axis: "Axes", methods: dict[str, Summary], value: Callable[[Summary], float | None]) -> None:
    """Draw a line over the fixed budgets, a star for the automatic one at its mean tree size, and levels for others."""
    trees = _fixed_trees(methods)
    axis.set_xscale("log", base=2)
    if trees:
        budgets = [budget for budget, _ in trees]
        axis.plot(budgets, _numbers(value(summary) for _, summary in trees), marker="o", label="tree")
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
    for summary in methods.values():
        if summary.tree_budget == "auto":
            place = _numbers([summary.tree_size, value(summary)])
            label = "tree auto,\nat its mean size"
            axis.plot(*place, "*", markersize=13, color=AUTO_COLOUR, label=label)
    baselines = {
        name: level
        for name, summary in methods.items()
        if summary.tree_budget is None and name != PLAIN and (level := value(summary)) is not None
    }
    for (name, level), (colour, style) in zip(baselines.items(), BASELINE_STYLES, strict=False):
        axis.axhline(level, color=colour, linestyle=style, label=name)
    axis.set_xlabel("tree budget (drafted nodes per round)")


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Return the values with NaN, which matplotlib leaves out, in place of None."""
    return [np.nan if value is None else value for value in values]


def _fixed_trees(methods: dict[str, Summary]) -> list[tuple[int, Summary]]:
    """Return the trees whose budget is a number, with their budgets, in rising order."""
    trees = [(s.tree_budget, s) for s in methods.values() if isinstance(s.tree_budget, int)]
    return sorted(trees, key=lambda tree: tree[0])


def draw_stages(axis: "Axes", methods: dict[str, dict[str, float]]) -> None:
    """Draw the milliseconds per round as bars, stacked by stage, with the host's share as a number above each bar."""
    names, bottom = [name.removeprefix("tree ") for name in methods], np.zeros(len(methods))
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        heights = np.array([times[stage] for times in methods.values()])
        axis.bar(names, heights, bottom=bottom, color=colour, label=stage)
        bottom += heights
    for place, (top, times) in enumerate(zip(bottom, methods.values(), strict=True)):
        axis.annotate(
            f"{times['host']:.1f}", (place, top), (0, 2), textcoords="offset points", ha="center", fontsize="x-small"
        )
    axis.plot([], [], " ", label="above the bars:\nhost (ms)")
    axis.tick_params(axis="x", rotation=45)
    axis.set_xlabel("chain, or tree budget (drafted nodes per round)")
    axis.set_ylabel("time per round (ms)")


def draw_acceptance(axis: "Axes", methods: dict[str, Summary]) -> None:
    """Draw the share of rounds by accepted length as lines, because so many bars side by side cannot be read."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    with_rounds = {name: summary for name, summary in methods.items() if len(summary.accepted_lengths)}
    colours = colormaps["viridis"](np.linspace(0, 0.9, max(1, len(with_rounds))))
    for (name, summary), colour in zip(with_rounds.items(), colours, strict=True):
        counts = summary.accepted_lengths
        axis.plot(
            100 * counts / counts.sum(),
            "o-" if summary.tree_budget is not None else "s--",
            color=AUTO_COLOUR if summary.tree_budget == "auto" else colour,
            markersize=4,
            linewidth=1.2,
            label=name,
        )
    axis.set_xlabel("accepted length (drafted tokens kept in a round)")
    axis.set_ylabel("rounds (%)")
    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
