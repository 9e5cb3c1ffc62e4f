"""The tables."""

from benchmark.support import speed_rows, timing_row

from hf_ddtree.benchmark.tables import baseline_table, kind_table, markdown_table, speed_table, stage_table

ROWS = speed_rows({"plain": [1.0, 10.0, 2.0], "chain": [0.8, 5.0, 2.0], "tree 4": [0.5, 5.0, 1.0]})


def test_markdown_table_has_a_caption_and_an_empty_line_at_the_end():
    table = markdown_table("Caption", ["a", "b"], [["1", "2"], ["3", "4"]])
    assert table == "Caption:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n"


def test_speed_table_has_medians_of_ratios():
    assert "| tree 4 | 2.00 (2.00-2.00) | 10.0 | 2.00 | 3.0 | 3/3 | - |" in speed_table(ROWS)


def test_speed_table_has_the_largest_gap():
    rows = speed_rows({"plain": [1.0, 1.0, 1.0], "tree 4": [1.0, 1.0, 1.0]})
    rows[3] |= {"differs_at": 2, "gap": 0.125, "gap_ulps": 1.0}
    rows[5] |= {"differs_at": 7, "gap": 0.25, "gap_ulps": 2.0}
    assert "| 1/3 | 0.25 (2 ulp) |" in speed_table(rows)


def test_speed_table_of_sampled_rows_compares_no_texts():
    rows = [{**row, "temperature": 1.0} for row in ROWS]
    assert "| plain | 1.00 (1.00-1.00) | 5.0 | 2.00 | 3.0 | - | - |" in speed_table(rows)


def test_speed_table_ignores_rows_of_the_timing_pass():
    assert speed_table([*ROWS, timing_row(2, 1, 1, 1, 1, 1, 1)]) == speed_table(ROWS)


def test_baseline_table_compares_trees_with_every_method_without_one():
    assert "| method | plain | chain |\n|---|---|---|\n| tree 4 | 2.00 | 1.60 |" in baseline_table(ROWS)


def test_kind_table_has_a_column_per_kind():
    assert "| method | even | odd |" in kind_table(ROWS)
    assert "| tree 4 | 2.00 | 2.00 |" in kind_table(ROWS)


def test_stage_table_has_milliseconds_per_round():
    rows = [timing_row(1, 0.1, 0.3, 0.01, 0.02, 0.08, 0.2), timing_row(3, 0.3, 0.5, 0.03, 0.02, 0.24, 0.4)]
    expected = "| tree 4 | 320.00 | 100.00 | 200.00 | 10.00 | 10.00 | 80.00 | 150.00 | 90.00 |"
    assert expected in stage_table([*rows, *ROWS])
