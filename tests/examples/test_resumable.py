"""examples/measure/resumable.py."""


def test_get_computes_a_value_once(script, tmp_path):
    path, calls = str(tmp_path / "results.jsonl"), []

    def compute(value, factor=1):
        calls.append(value)
        return [factor * value]

    results = script("resumable").Results(path)
    assert results.get((0, "a"), compute, 3, factor=2) == [6]
    assert results.get((0, "a"), compute, 3, factor=2) == [6]
    resumed = script("resumable").Results(path)
    assert resumed.get((0, "a"), compute, 3) == [6]
    assert resumed.get((1, None), compute, 4) == [4]
    assert calls == [3, 4]


def test_results_without_a_path_stay_in_memory(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = script("resumable").Results(None)
    assert [results.get(("a",), lambda value=value: value) for value in (1, 2)] == [1, 1]
    assert list(tmp_path.iterdir()) == []
