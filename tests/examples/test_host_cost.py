"""examples/measure/host_cost.py."""

import json
import sys

import pytest
import torch

from hf_ddtree import POLICIES, DraftTree


def test_host_cost_times_every_stage_and_policy(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_cost.py", "--budgets", "4", "--repeats", "1"])
    script("host_cost").main()
    report = json.loads(capsys.readouterr().out)
    times = report["milliseconds"]["4"]
    assert list(times) == ["total", "vocabulary scan", "build_tree", "mask", "walk", "commit"]
    assert times["total"] == pytest.approx(
        sum(times[name] for name in ("build_tree", "mask", "walk", "commit")), abs=0.01
    )
    assert list(report["sampled walk"]) == list(POLICIES) and min(report["sampled walk"].values()) > 0


def test_walk_seconds_refuses_another_path(script):
    host_cost, tree = script("host_cost"), DraftTree.from_lists([0, 1, 2], [-1, 0, 1])
    logits = host_cost.target_logits(tree, [0, 1])
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"took \[0, 1\] instead of \[0, 1, 2\]"):
        host_cost.walk_seconds(tree, [0, 1, 2], logits, do_sample=False)


def test_deep_path_ends_at_the_accepted_length(script):
    host_cost = script("host_cost")
    assert host_cost.deep_path(DraftTree.chain([0] * 9)) == [0, 1, 2, 3, 4]
    assert host_cost.deep_path(DraftTree.chain([0] * 3)) == [0, 1, 2]
