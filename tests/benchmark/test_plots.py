"""The plots."""

import pytest
from benchmark.support import speed_rows, timing_row
from matplotlib.figure import Figure

from hf_ddtree.benchmark.plots import draw_acceptance, draw_speedup, draw_stages, draw_tokens_per_round, save_plots
from hf_ddtree.benchmark.summary import stage_times, summarize

ROWS = speed_rows({"plain": [1.0, 2.0], "chain": [0.8, 1.5], "tree 4": [0.5, 1.0], "tree auto": [0.4, 1.0]})


@pytest.fixture
def axis():
    return Figure().subplots()


def labels(axis) -> list[str]:
    return axis.get_legend_handles_labels()[1]


def test_save_plots_draws_what_there_are_rows_for(tmp_path):
    assert save_plots([], str(tmp_path / "none")) == []
    assert len(save_plots(ROWS, str(tmp_path / "speed"))) == 3
    assert len(save_plots([*ROWS, timing_row(2, 1, 1, 1, 1, 1, 1)], str(tmp_path / "both"))) == 4
    assert len(list(tmp_path.glob("*.png"))) == 7


def test_draw_tokens_per_round_shows_fixed_and_automatic_trees_and_baselines(axis):
    draw_tokens_per_round(axis, summarize(ROWS)[0.0])
    assert labels(axis) == ["tree", "tree auto,\nat its mean size", "chain"]
    assert "accepted length" in axis.get_ylabel()


def test_draw_speedup_shows_the_interval_and_plain_generate(axis):
    draw_speedup(axis, summarize(ROWS)[0.0])
    assert {"95% interval", "plain"} < set(labels(axis))


def test_draw_stages_writes_the_share_of_the_host_above_the_bars(axis):
    draw_stages(axis, stage_times([timing_row(1, 0.1, 0.3, 0.01, 0.02, 0.08, 0.2)])[0.0])
    assert [text.get_text() for text in axis.texts] == ["150.0"]


def test_draw_acceptance_shows_shares_of_rounds(axis):
    draw_acceptance(axis, summarize(ROWS)[0.0])
    assert [list(line.get_ydata()) for line in axis.lines] == [[50, 0, 50]] * 4
