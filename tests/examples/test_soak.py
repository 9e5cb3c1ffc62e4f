"""examples/measure/soak.py: a hundred random requests, and what the script says of a request that differs.

The script without options runs 5,000 requests.
"""

import argparse
import json
import sys

import pytest
import torch

BLOCKS = 10
CASES = 100


@pytest.fixture
def isolated_cache(monkeypatch, tmp_path):
    """Keep the costs that the automatic budget measures out of the user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")  # the random lengths do not always fit together
@pytest.mark.usefixtures("isolated_cache")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_soak_finds_no_difference_in_a_hundred_requests(script, block):
    random_case, run = script("soak_cases").random_case, script("soak_run")
    outcomes = {}
    for seed in range(block * CASES // BLOCKS, (block + 1) * CASES // BLOCKS):
        outcomes[seed] = run.run(random_case(seed))
    failed = {seed: report for seed, report in outcomes.items() if report["outcome"] in (run.DIFFERENT, run.REFUSED)}
    assert failed == {}
    assert sum(report["outcome"] == run.EQUAL for report in outcomes.values()) >= 5, "most requests are compared"


def test_random_case_follows_from_its_seed_alone(script):
    cases = script("soak_cases")
    assert [cases.random_case(seed) for seed in range(50)] == [cases.random_case(seed) for seed in range(50)]
    assert len({cases.random_case(seed).family for seed in range(200)}) > 40


FAULTS = {
    "tokens": lambda output: output.sequences[0, -1:].add_(1),
    "scores": lambda output: output.scores[0].add_(1.0),
    "cache": lambda output: output.cache.layers[0].keys[..., 0, :].add_(1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_run_reports_a_wrong_output(script, monkeypatch, fault):
    run, cases = script("soak_run"), script("soak_cases")
    fields = {"family": "llama", "tree_sampling": "target", "prior": None, "processors": (), "eos_token_ids": ()}
    fields |= {"stop": None, "default_device": None, "default_dtype": None, "max_new_tokens": 8, "tree_budget": 8}
    case = cases.Case(**{**vars(cases.random_case(0)), **fields, "drafter": "look-up", "warpers": None})
    assert run.run(case)["outcome"] == run.EQUAL
    original = run.call

    def call(case, tree, **options):
        output, stream = original(case, tree, **options)
        if tree:
            FAULTS[fault](output)
        return output, stream

    monkeypatch.setattr(run, "call", call)
    report = run.run(case)
    assert report["outcome"] == run.DIFFERENT
    assert fault in report["detail"]


def test_cut_differs_between_scores_that_are_close_to_the_cut_only(script):
    cut_differs = script("soak_run").cut_differs
    scores, inf = torch.tensor([[3.0, 1.0, 1.0 + 1e-6]]), torch.inf
    one, other = scores.clone(), scores.clone()
    one[0, 1], other[0, 2] = -inf, -inf
    assert cut_differs(one, other) and not cut_differs(one, one)
    other[0, 0] = -inf
    assert not cut_differs(one, other), "the first token is far above the cut"


def test_soak_prints_the_seed_of_a_failure_and_goes_on_where_it_stopped(script, monkeypatch, tmp_path, capsys):
    soak, ran, path = script("soak"), [], str(tmp_path / "soak.jsonl")

    def run(case):
        ran.append(case.seed)
        return {"outcome": soak.DIFFERENT if case.seed == 11 else "equal", "detail": "tokens differ at 3"}

    monkeypatch.setattr(soak, "run", run)
    for cases in (3, 6):
        options = argparse.Namespace(cases=cases, first_seed=9, minutes=None, output=path)
        counts, failed = soak.soak(options)
        assert (sum(counts.values()), failed) == (cases, [11])
    assert ran == list(range(9, 15))
    printed = capsys.readouterr().out
    assert "seed 11: different" in printed and "tokens differ at 3" in printed and "family=" in printed


def test_main_ends_with_json_and_status_1(script, monkeypatch, capsys):
    soak, threads = script("soak"), torch.get_num_threads()
    monkeypatch.setattr(soak, "run", lambda case: {"outcome": soak.REFUSED, "detail": "ValueError"})
    monkeypatch.setattr(sys, "argv", ["soak.py", "--cases", "2", "--first-seed", "5"])
    monkeypatch.setenv("XDG_CACHE_HOME", "restored afterwards")
    with pytest.raises(SystemExit) as stopped:
        soak.main()
    torch.set_num_threads(threads)
    assert stopped.value.code == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed_seeds"] == [5, 6]
