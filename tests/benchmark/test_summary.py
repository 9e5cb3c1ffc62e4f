"""Figures computed from the rows."""

import pytest
import torch
from benchmark.support import speed_rows, timing_row

from hf_ddtree.benchmark.summary import interval, speedups, stage_times, summarize


def test_speedups_are_ratios_on_the_same_prompt():
    """A slow prompt, or an hour in which the machine is slow, must not count against the method that met it."""
    rows = speed_rows({"plain": [1.0, 10.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})
    assert speedups(rows)[0.0, "tree 4"] == {"even": [2.0, 2.0], "odd": [2.0]}
    assert speedups(rows, baseline="tree 4")[0.0, "plain"] == {"even": [0.5, 0.5], "odd": [0.5]}


def test_summarize_adds_up_accepted_lengths():
    rows = speed_rows({"plain": [1.0, 10.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})
    rows[4]["accepted_lengths"] = [1, 0, 1, 0, 2]
    summary = summarize(rows)[0.0]["tree 4"]
    assert summary.accepted_lengths.tolist() == [3, 0, 3, 0, 2]
    assert (summary.speedup, summary.low, summary.high) == (2.0, 2.0, 2.0)


def test_summarize_ignores_rows_of_the_timing_pass():
    rows = speed_rows({"plain": [1.0]})
    assert list(summarize([*rows, timing_row(1, 1, 1, 1, 1, 1, 1)])[0.0]) == ["plain"]


def test_interval_holds_the_median_and_narrows_with_the_sample():
    generator = torch.Generator().manual_seed(0)
    small, large = (torch.randn(n, generator=generator).add(2).tolist() for n in (10, 1000))
    for sample in (small, large):
        low, high = interval(sample)
        assert low <= float(torch.tensor(sample).median()) <= high
    assert interval(large)[1] - interval(large)[0] < interval(small)[1] - interval(small)[0]


def test_stage_times_are_means_per_round():
    rows = [timing_row(1, 0.1, 0.3, 0.01, 0.02, 0.08, 0.2), timing_row(3, 0.3, 0.5, 0.03, 0.02, 0.24, 0.4)]
    expected = {
        "draft": 100.0,
        "verify": 200.0,
        "walk": 10.0,
        "commit": 10.0,
        "drafter forward": 80.0,
        "target forward": 150.0,
        "round": 320.0,
        "host": 90.0,
    }
    assert stage_times(rows) == {0.0: {"tree 4": pytest.approx(expected)}}
