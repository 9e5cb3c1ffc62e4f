"""What a run prints and draws."""

from benchmark.support import speed_rows, timing_row

from hf_ddtree.benchmark import report as module
from hf_ddtree.benchmark.report import print_report, print_verify_cost
from hf_ddtree.budget.cost import VerifyCost

ROWS = [*speed_rows({"plain": [1.0, 2.0], "tree 4": [0.5, 1.0]}), timing_row(2, 1, 1, 1, 1, 1, 1)]


def test_print_report_prints_every_table_and_names_the_plots(tmp_path, capsys):
    print_report(ROWS, str(tmp_path / "run"))
    printed = capsys.readouterr().out
    captions = ("Temperature 0:", "Speedup over each baseline", "Speedup by kind of prompt", "Milliseconds per round")
    assert all(caption in printed for caption in captions)
    assert all(str(path) in printed for path in tmp_path.glob("*.png"))
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_print_report_without_an_output_draws_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_report(ROWS, None)
    assert list(tmp_path.iterdir()) == []


def test_print_verify_cost_names_its_plot(tmp_path, capsys, monkeypatch):
    cost = VerifyCost([1, 3], [64, 1024], [[0.01, 0.02], [0.02, 0.03]])
    monkeypatch.setattr(module, "target_cost", lambda target: cost)
    print_verify_cost(None, str(tmp_path / "run"))
    assert f"{tmp_path / 'run'}-verify_cost.png" in capsys.readouterr().out
    assert (tmp_path / "run-verify_cost.png").exists()
