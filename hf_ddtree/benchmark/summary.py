"""Figures computed from the rows: medians of per-prompt ratios with bootstrap intervals, and times per round."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .methods import PLAIN
from .rows import Row, grouped, rows_of_pass
from .stages import FORWARDS, STAGES

N_RESAMPLES = 2000


@dataclass
class Summary:
    """One method at one temperature.

    Args:
        tree_budget: the budget of a tree, None for every other method.
        speedup: the median over prompts of the speedup over plain generate.
        low: the lower end of its 95% bootstrap interval.
        high: the upper end.
        tokens_per_second: the median over prompts, prefill included.
        tokens_per_round: the mean over prompts of accepted_length + 1, None without rounds.
        tree_size: the mean over prompts of the drafted nodes per round, None without rounds.
        accepted_lengths: how many rounds accepted 0, 1, 2, ... drafted tokens.
        n_prompts: the number of prompts.
        n_equal: how many texts equal plain generate's.
        gap: the largest gap of the texts that do not, 0 if there are none.
        gap_ulps: the same in ulps.
    """

    tree_budget: int | str | None
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    tokens_per_round: float | None
    tree_size: float | None
    accepted_lengths: np.ndarray
    n_prompts: int
    n_equal: int
    gap: float
    gap_ulps: float


def summarize(rows: list[Row]) -> dict[float, dict[str, Summary]]:
    """Return the summaries of the speed rows by temperature and method.

    Args:
        rows: rows of any pass.
    """
    rows = rows_of_pass(rows, "speed")
    ratios = speedups(rows)
    return {
        temperature: {
            method: _summary(chosen, list(chain.from_iterable(ratios[temperature, method].values())))
            for method, chosen in methods.items()
        }
        for temperature, methods in grouped(rows).items()
    }


def speedups(rows: list[Row], baseline: str = PLAIN) -> dict[tuple[float, str], dict[str, list[float]]]:
    """Return, per temperature and method, the speedup on each prompt, by kind of prompt.

    A speedup is the ratio of the tokens per second of two methods on the same prompt.

    Args:
        rows: rows of the speed pass.
        baseline: the method whose speed is 1.
    """
    rates = {(row["temperature"], row["method"], row["seed"]): row["new_tokens"] / row["seconds"] for row in rows}
    ratios: dict[tuple[float, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        temperature, method, seed = row["temperature"], row["method"], row["seed"]
        ratio = rates[temperature, method, seed] / rates[temperature, baseline, seed]
        ratios[temperature, method][row["kind"]].append(ratio)
    return ratios


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median.

    Args:
        values: a sample.
    """
    sample = np.array(values)
    index = np.random.default_rng(0).integers(len(sample), size=(N_RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(sample[index], axis=1), [2.5, 97.5])
    return float(low), float(high)


def _summary(rows: list[Row], ratios: list[float]) -> Summary:
    """Return the summary of the rows of one method at one temperature, from its speedups over plain generate."""
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
        tokens_per_round=_mean(with_rounds, "tokens_per_round"),
        tree_size=_mean(with_rounds, "tree_size"),
        accepted_lengths=counts,
        n_prompts=len(rows),
        n_equal=sum(row.get("differs_at") is None for row in rows),
        gap=max(row.get("gap", 0.0) for row in rows),
        gap_ulps=max(row.get("gap_ulps", 0.0) for row in rows),
    )


def _mean(rows: list[Row], column: str) -> float | None:
    return float(np.mean([row[column] for row in rows])) if rows else None


def stage_times(rows: list[Row]) -> dict[float, dict[str, dict[str, float]]]:
    """Return the mean milliseconds per round by temperature and method.

    Args:
        rows: rows of any pass.

    Returns:
        The milliseconds of each stage and forward, of the whole "round", and of the "host": the round without the two
        forwards.
    """
    result: dict[float, dict[str, dict[str, float]]] = defaultdict(dict)
    for temperature, methods in grouped(rows_of_pass(rows, "timing")).items():
        for method, chosen in methods.items():
            rounds = max(1, sum(row["rounds"] for row in chosen))
            times = {name: 1000 * sum(row["seconds"][name] for row in chosen) / rounds for name in STAGES + FORWARDS}
            times["round"] = sum(times[stage] for stage in STAGES)
            times["host"] = times["round"] - sum(times[forward] for forward in FORWARDS)
            result[temperature][method] = times
    return result
