"""PNG plots of a benchmark's rows, one panel per temperature."""

import numpy as np

from .methods import PLAIN
from .report import Summary, stage_times, summarize
from .stages import STAGES

AUTO_COLOUR = "#aa3377"
STAGE_COLOURS = ("#4477aa", "#ccbb44", "#228833", "#aa3377")
REFERENCE_STYLES = (("#555555", "--"), ("#cc6600", "-."), ("#008080", ":"))


def save_plots(rows: list[dict], prefix: str) -> list[str]:
    """Write PREFIX-tokens_per_round.png, -speedup.png, -stages.png and -acceptance.png, where there is data.

    Returns:
        The names of the files.
    """
    summaries, times = summarize(rows), stage_times(rows)
    plots = {
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


def save_panels(panels: dict[float, dict], draw, file: str) -> None:
    """Draw one panel per temperature, with common axes, and one legend for all of them."""
    # here, because only plots need matplotlib; without pyplot, because that keeps every figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 4.2), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    legend = {}
    for axis, (temperature, methods) in zip(axes, panels.items()):
        draw(axis, methods)
        axis.set_title(f"temperature {temperature:g}")
        axis.grid(True, alpha=0.3)
        axis.set_axisbelow(True)
        legend.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels())})
    for axis in axes[1:]:
        axis.set_ylabel("")
    axes[0].set_ylim(bottom=0)  # only now: it ends the scaling of the common axis
    figure.legend(legend.values(), legend.keys(), loc="outside right center", fontsize="small")
    figure.savefig(file)


def draw_tokens_per_round(axis, methods: dict[str, Summary]) -> None:
    """tokens_per_round over tree size."""
    draw_over_budget(axis, methods, lambda summary: summary.tokens_per_round)
    axis.set_ylabel("tokens per round (tokens)")


def draw_speedup(axis, methods: dict[str, Summary]) -> None:
    """Speedup over tree size, with its interval, and plain generate at 1."""
    draw_over_budget(axis, methods, lambda summary: summary.speedup)
    trees = fixed_trees(methods)
    if trees:
        budgets = [summary.tree_budget for summary in trees]
        axis.fill_between(budgets, [s.low for s in trees], [s.high for s in trees], alpha=0.2, label="95% interval")
    axis.axhline(1, color="black", linewidth=0.8, label=PLAIN)
    axis.set_ylabel("speedup over plain generate (ratio)")


def draw_over_budget(axis, methods: dict[str, Summary], value) -> None:
    """A line over the budgets of trees, a star for an automatic budget at its mean tree size, levels for the others."""
    trees = fixed_trees(methods)
    axis.set_xscale("log", base=2)
    if trees:
        budgets = [summary.tree_budget for summary in trees]
        axis.plot(budgets, [value(summary) for summary in trees], marker="o", label="tree")
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
    automatic = [summary for summary in methods.values() if summary.tree_budget == "auto"]
    for summary in automatic:
        axis.plot(
            summary.tree_size,
            value(summary),
            "*",
            markersize=13,
            color=AUTO_COLOUR,
            label="tree auto,\nat its mean size",
        )
    others = {
        name: value(summary)
        for name, summary in methods.items()
        if summary.tree_budget is None and name != PLAIN and value(summary) is not None
    }
    for (name, level), (colour, style) in zip(others.items(), REFERENCE_STYLES):
        axis.axhline(level, color=colour, linestyle=style, label=name)
    axis.set_xlabel("tree budget (drafted nodes per round)")


def fixed_trees(methods: dict[str, Summary]) -> list[Summary]:
    """The trees whose budget is a number, in rising order."""
    trees = [summary for summary in methods.values() if isinstance(summary.tree_budget, int)]
    return sorted(trees, key=lambda summary: summary.tree_budget)


def draw_stages(axis, methods: dict[str, dict[str, float]]) -> None:
    """Milliseconds per round, stacked by stage; above each bar the host's share."""
    names, bottom = [name.removeprefix("tree ") for name in methods], np.zeros(len(methods))
    for stage, colour in zip(STAGES, STAGE_COLOURS):
        heights = np.array([times[stage] for times in methods.values()])
        axis.bar(names, heights, bottom=bottom, color=colour, label=stage)
        bottom += heights
    for place, (top, times) in enumerate(zip(bottom, methods.values())):
        axis.annotate(
            f"{times['host']:.1f}", (place, top), (0, 2), textcoords="offset points", ha="center", fontsize="x-small"
        )
    axis.plot([], [], " ", label="above the bars:\nhost (ms)")
    axis.tick_params(axis="x", rotation=45)
    axis.set_xlabel("chain, or tree budget (drafted nodes per round)")
    axis.set_ylabel("time per round (ms)")


def draw_acceptance(axis, methods: dict[str, Summary]) -> None:
    """The share of rounds by accepted length: lines, because so many bars side by side cannot be read."""
    from matplotlib import colormaps

    with_rounds = {name: summary for name, summary in methods.items() if len(summary.accepted_lengths)}
    colours = colormaps["viridis"](np.linspace(0, 0.9, max(1, len(with_rounds))))
    for (name, summary), colour in zip(with_rounds.items(), colours):
        colour = AUTO_COLOUR if summary.tree_budget == "auto" else colour
        counts = summary.accepted_lengths
        style = "o-" if summary.tree_budget is not None else "s--"
        axis.plot(100 * counts / counts.sum(), style, color=colour, markersize=4, linewidth=1.2, label=name)
    axis.set_xlabel("accepted length (drafted tokens kept in a round)")
    axis.set_ylabel("rounds (%)")
    axis.xaxis.get_major_locator().set_params(integer=True)
