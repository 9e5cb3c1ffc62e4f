"""Rows in memory and in their file."""

from benchmark.support import read_rows, speed_rows, timing_row

from hf_ddtree.benchmark.rows import RowFile, grouped, rows_of_pass


def test_rows_of_pass_selects_one_pass():
    speed, timing = speed_rows({"plain": [1.0]}), timing_row(1, 1, 1, 1, 1, 1, 1)
    assert rows_of_pass([timing, *speed], "speed") == speed
    assert rows_of_pass([timing, *speed], "timing") == [timing]


def test_grouped_sorts_temperatures_and_keeps_the_order_of_methods():
    rows = speed_rows({"tree 4": [1.0, 2.0], "plain": [1.0, 2.0]})
    warm = [{**row, "temperature": 1.0} for row in rows]
    groups = grouped(warm + rows)
    assert list(groups) == [0.0, 1.0]
    assert list(groups[0.0]) == ["tree 4", "plain"]
    assert groups[1.0]["plain"] == warm[2:]


def test_row_file_grows_until_it_is_cleared(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    file, rows = RowFile(str(path)), speed_rows({"plain": [1.0, 2.0]})
    file.clear()
    file.append(rows[:1])
    file.append(rows[1:])
    assert read_rows(path) == rows
    file.clear()
    assert path.read_text() == ""
