"""Comparisons: plain generation and DDTree on the same form, one after the other."""

from dataclasses import replace

import pytest
import torch
from demo.support import ask, finish

from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Sampling, StopSwitch, compare


@pytest.mark.parametrize("drafter", [DRAFTER, PROMPT_LOOKUP])
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_compare_gives_the_tokens_of_generate(loaded, drafter, sampling):
    form = ask(drafter=drafter, sampling=sampling, repetition_penalty=1.1)
    comparison = finish(loaded, form)
    inputs = form.inputs(loaded)
    torch.manual_seed(3)
    expected = loaded.model.generate(**inputs, **form.settings()).sequences[0, inputs["input_ids"].shape[1] :]
    assert comparison.plain.token_ids == comparison.drafted.token_ids == expected.tolist()
    assert comparison.verdict.kind == "identical"
    assert "24" in comparison.verdict.text
    assert comparison.plain.finished and comparison.drafted.finished
    assert 0 < comparison.plain.first_token_seconds < comparison.plain.seconds
    assert comparison.plain.rounds is None


def test_compare_draws_by_the_seed(loaded):
    texts = {tuple(finish(loaded, ask(sampling=Sampling(seed=seed))).plain.token_ids) for seed in range(4)}
    assert len(texts) > 1


def test_compare_runs_plain_generation_first(loaded, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.run.REFRESH_SECONDS", 0)
    seen = list(compare(loaded, ask(), StopSwitch()))
    plain = [len(step.plain.token_ids) for step in seen if step.drafted is None]
    drafted = [len(step.drafted.token_ids) for step in seen if step.drafted is not None]
    assert plain == sorted(plain) and drafted == sorted(drafted)
    assert len(set(plain)) > 3 and len(set(drafted)) > 3
    assert all(step.plain.finished for step in seen if step.drafted is not None)


def test_compare_raises_what_generate_raises(loaded):
    broken = replace(loaded, drafters={PROMPT_LOOKUP: "no drafter"})
    with pytest.raises(ValueError, match="drafter"):
        finish(broken, ask())


@pytest.mark.parametrize("during", ["plain", "drafted"])
def test_compare_ends_at_once_when_stopped(loaded, during, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.run.REFRESH_SECONDS", 0)
    switch = StopSwitch()
    for step in compare(loaded, ask(max_new_tokens=300), switch):
        run = step.plain if during == "plain" else step.drafted
        if run is not None and len(run.token_ids) >= 5:
            switch.pressed = True
    stopped, other = (step.plain, step.drafted) if during == "plain" else (step.drafted, step.plain)
    assert 5 <= len(stopped.token_ids) < 300
    assert len(other.token_ids) == (0 if during == "plain" else 300)
    assert step.verdict.kind == "stopped"


def test_compare_works_after_a_stopped_run(loaded):
    switch = StopSwitch(pressed=True)
    assert len(finish(loaded, ask(), switch).plain.token_ids) <= 1
    assert finish(loaded, ask(), StopSwitch()).verdict.kind == "identical"
