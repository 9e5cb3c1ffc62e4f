"""examples/measure/attention_speed.py in Triton's interpreter."""

import json

import pytest

SMALL = ["--device", "cpu", "--shapes", "tiny", "--nodes", "5", "--lengths", "32", "--dtypes", "float32"]


@pytest.mark.parametrize("kernel", [False, True])
def test_attention_speed_measures_a_layer_and_a_model(script, capsys, kernel):
    if kernel:
        pytest.importorskip("triton", reason="needs Triton")
    options = [*SMALL, "--model", "tiny", "--repeats", "1", *["--kernel"] * kernel]
    script("attention_speed").main(options)
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    [layer], [model] = results["attention"], results["verify"]
    assert set(layer["ms"]) == {"sdpa", "grouped", *["triton"] * kernel}
    # fp32 sums in another order; tests/kernels holds the kernel to the same bound
    assert not kernel or layer["error"] < 2e-6
    for backend in ("sdpa", "triton") if kernel else ("sdpa",):
        assert set(model[backend]["ms"]) == {"1", "5"} and model[backend]["relative"]["1"] == 1


def test_runs_leaves_out_a_method_that_fails(script, capsys):
    def fail():
        raise TypeError("no such device")

    assert script("attention_speed").runs("flex", fail) is False
    assert "flex is left out: no such device" in capsys.readouterr().out
