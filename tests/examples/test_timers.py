"""examples/measure/timers.py."""

import torch

CPU = torch.device("cpu")


def test_median_milliseconds_lets_the_functions_take_turns(script):
    timers, calls = script("timers"), []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = timers.median_milliseconds(functions, CPU, repeats=2)
    assert calls == ["a", "b"] * (timers.N_WARM_UP + 2)
    assert set(found) == {"a", "b"} and min(found.values()) > 0


def test_median_milliseconds_leaves_out_the_warm_up(script, monkeypatch):
    timers = script("timers")
    seconds = iter([9.0] * timers.N_WARM_UP + [0.001, 0.003, 0.002])
    monkeypatch.setattr(timers, "seconds_per_call", lambda function, device: next(seconds))
    assert timers.median_milliseconds({"a": None}, CPU, repeats=3) == {"a": 2.0}
