"""Figures from the rows of a benchmark: medians of per-prompt ratios, with bootstrap intervals."""

from collections import defaultdict

import numpy as np

from .methods import PLAIN


def speedups(rows: list[dict], baseline: str = PLAIN) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Per temperature and method: the ratios of tokens per second to the baseline's on the same prompt, by kind of prompt."""
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


def table(rows: list[dict]) -> str:
    """One Markdown table per temperature: speed, acceptance and exactness of every method."""
    ratios, parts = speedups(rows), []
    for temperature in sorted({row["temperature"] for row in rows}):
        parts.append(f"Temperature {temperature:g}:\n")
        parts.append("| method | speedup (95%) | tokens/s | tokens per round | equal to plain |\n|---|---|---|---|---|")
        for method in dict.fromkeys(row["method"] for row in rows):
            chosen = [row for row in rows if (row["temperature"], row["method"]) == (temperature, method)]
            values = [ratio for kind in ratios[temperature, method].values() for ratio in kind]
            low, high = interval(values)
            rate = np.median([row["new_tokens"] / row["seconds"] for row in chosen])
            taus = [row["tokens_per_round"] for row in chosen if row["tokens_per_round"] is not None]
            tau = f"{np.mean(taus):.2f}" if taus else "-"
            equal = "-" if temperature else f"{sum(row['differs_at'] is None for row in chosen)}/{len(chosen)}"
            parts.append(
                f"| {method} | {np.median(values):.2f} ({low:.2f}-{high:.2f}) | {rate:.1f} | {tau} | {equal} |"
            )
        parts.append("")
    return "\n".join(parts)


def kind_table(rows: list[dict]) -> str:
    """One Markdown table per temperature: the median speedup by kind of prompt."""
    ratios, parts = speedups(rows), []
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for temperature in sorted({row["temperature"] for row in rows}):
        parts.append(f"Speedup by kind of prompt, temperature {temperature:g}:\n")
        parts.append(f"| method | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
        for method in dict.fromkeys(row["method"] for row in rows):
            medians = (f"{np.median(ratios[temperature, method][kind]):.2f}" for kind in kinds)
            parts.append(f"| {method} | {' | '.join(medians)} |")
        parts.append("")
    return "\n".join(parts)
