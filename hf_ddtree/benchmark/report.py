"""Figures from the rows of a benchmark: medians of per-prompt ratios, with bootstrap intervals."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from .methods import PLAIN
from .stages import FORWARDS, STAGES


@dataclass
class Summary:
    """One method at one temperature.

    Args:
        tree_budget: as in its rows.
        speedup, low, high: median of the per-prompt ratios to plain generate, and its 95% bootstrap interval.
        tokens_per_second: median over prompts, prefill included.
        tokens_per_round, tree_size: means over prompts, None without rounds.
        accepted_lengths: rounds that accepted 0, 1, 2, ... drafted tokens.
        prompts: how many there are.
        equal: how many of the texts equal plain generate's.
        gap, gap_ulps: the largest of the texts that do not, 0 if there are none.
    """

    tree_budget: int | str | None
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    tokens_per_round: float | None
    tree_size: float | None
    accepted_lengths: np.ndarray
    prompts: int
    equal: int
    gap: float
    gap_ulps: float


def of_pass(rows: list[dict], name: str) -> list[dict]:
    """The rows of one pass, "speed" or "timing"."""
    return [row for row in rows if row["pass"] == name]


def grouped(rows: list[dict]) -> dict[float, dict[str, list[dict]]]:
    """Rows by temperature, in rising order, and method, in order of appearance."""
    groups: dict = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["temperature"]):
        groups[row["temperature"]][row["method"]].append(row)
    return groups


def speedups(rows: list[dict], baseline: str = PLAIN) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Per temperature and method: ratios of tokens per second to the baseline's on the same prompt, by kind."""
    rates = {(row["temperature"], row["method"], row["seed"]): row["new_tokens"] / row["seconds"] for row in rows}
    ratios: dict = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = row["temperature"], row["method"]
        ratio = rates[*key, row["seed"]] / rates[row["temperature"], baseline, row["seed"]]
        ratios[key][row["kind"]].append(ratio)
    return ratios


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float]:
    """The 95% bootstrap interval of the median."""
    sample = np.array(values)
    index = np.random.default_rng(0).integers(len(sample), size=(resamples, len(sample)))
    low, high = np.percentile(np.median(sample[index], axis=1), [2.5, 97.5])
    return float(low), float(high)


def summarize(rows: list[dict]) -> dict[float, dict[str, Summary]]:
    """The speed rows by temperature and method."""
    rows = of_pass(rows, "speed")
    ratios = speedups(rows)
    return {
        temperature: {
            method: summary(chosen, [ratio for kind in ratios[temperature, method].values() for ratio in kind])
            for method, chosen in methods.items()
        }
        for temperature, methods in grouped(rows).items()
    }


def summary(rows: list[dict], ratios: list[float]) -> Summary:
    """What the rows of one method at one temperature, and its speedups, come to."""
    low, high = interval(ratios)
    with_rounds = [row for row in rows if row["tokens_per_round"] is not None]
    counts = np.zeros(max((len(row["accepted_lengths"]) for row in with_rounds), default=0), dtype=int)
    for row in with_rounds:
        counts[: len(row["accepted_lengths"])] += row["accepted_lengths"]
    return Summary(
        tree_budget=rows[0]["tree_budget"],
        speedup=float(np.median(ratios)),
        low=low,
        high=high,
        tokens_per_second=float(np.median([row["new_tokens"] / row["seconds"] for row in rows])),
        tokens_per_round=float(np.mean([row["tokens_per_round"] for row in with_rounds])) if with_rounds else None,
        tree_size=float(np.mean([row["tree_size"] for row in with_rounds])) if with_rounds else None,
        accepted_lengths=counts,
        prompts=len(rows),
        equal=sum(row.get("differs_at") is None for row in rows),
        gap=max(row.get("gap", 0.0) for row in rows),
        gap_ulps=max(row.get("gap_ulps", 0.0) for row in rows),
    )


def table(rows: list[dict]) -> str:
    """One Markdown table per temperature: speed, acceptance and exactness of every method."""
    parts = []
    for temperature, methods in summarize(rows).items():
        parts.append(f"Temperature {temperature:g}:\n")
        parts.append("| method | speedup (95%) | tokens/s | tokens per round | nodes | equal to plain | largest gap |")
        parts.append("|---|---|---|---|---|---|---|")
        for name, s in methods.items():
            speed = f"{s.speedup:.2f} ({s.low:.2f}-{s.high:.2f}) | {s.tokens_per_second:.1f}"
            rounds = "- | -" if s.tokens_per_round is None else f"{s.tokens_per_round:.2f} | {s.tree_size:.1f}"
            equal = "-" if temperature else f"{s.equal}/{s.prompts}"
            gap = "-" if s.equal == s.prompts else f"{s.gap:.3g} ({s.gap_ulps:.3g} ulp)"
            parts.append(f"| {name} | {speed} | {rounds} | {equal} | {gap} |")
        parts.append("")
    return "\n".join(parts)


def baseline_table(rows: list[dict]) -> str:
    """One Markdown table per temperature: the median speedup of every tree over each method without one."""
    rows = of_pass(rows, "speed")
    trees = list(dict.fromkeys(row["method"] for row in rows if row["tree_budget"] is not None))
    baselines = list(dict.fromkeys(row["method"] for row in rows if row["tree_budget"] is None))
    ratios, parts = {baseline: speedups(rows, baseline) for baseline in baselines}, []
    for temperature in grouped(rows):
        parts.append(f"Speedup over each baseline, temperature {temperature:g}:\n")
        parts.append(f"| method | {' | '.join(baselines)} |\n|---|{'---|' * len(baselines)}")
        for tree in trees:
            values = (sum(ratios[baseline][temperature, tree].values(), []) for baseline in baselines)
            parts.append(f"| {tree} | {' | '.join(f'{np.median(v):.2f}' for v in values)} |")
        parts.append("")
    return "\n".join(parts)


def kind_table(rows: list[dict]) -> str:
    """One Markdown table per temperature: the median speedup by kind of prompt."""
    rows = of_pass(rows, "speed")
    ratios, parts = speedups(rows), []
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for temperature, methods in grouped(rows).items():
        parts.append(f"Speedup by kind of prompt, temperature {temperature:g}:\n")
        parts.append(f"| method | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
        for method in methods:
            values = (ratios[temperature, method][kind] for kind in kinds)
            parts.append(f"| {method} | {' | '.join(f'{np.median(v):.2f}' if v else '-' for v in values)} |")
        parts.append("")
    return "\n".join(parts)


def stage_times(rows: list[dict]) -> dict[float, dict[str, dict[str, float]]]:
    """Mean milliseconds per round of every stage and forward, and of "round" and "host", from the timing rows.

    "host" is the round without the two forwards.
    """
    result: dict = defaultdict(dict)
    for temperature, methods in grouped(of_pass(rows, "timing")).items():
        for method, chosen in methods.items():
            rounds = max(1, sum(row["rounds"] for row in chosen))
            times = {n: 1000 * sum(row["seconds"][n] for row in chosen) / rounds for n in (*STAGES, *FORWARDS)}
            times["round"] = sum(times[stage] for stage in STAGES)
            times["host"] = times["round"] - sum(times[forward] for forward in FORWARDS)
            result[temperature][method] = times
    return result


def stage_table(rows: list[dict]) -> str:
    """One Markdown table per temperature: milliseconds per round by stage."""
    names, parts = ("round", *STAGES, *FORWARDS, "host"), []
    for temperature, methods in stage_times(rows).items():
        parts.append(f"Milliseconds per round, temperature {temperature:g}:\n")
        parts.append(f"| method | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for method, times in methods.items():
            parts.append(f"| {method} | {' | '.join(f'{times[name]:.2f}' for name in names)} |")
        parts.append("")
    return "\n".join(parts)
