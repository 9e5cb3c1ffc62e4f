"""One generation in a thread."""

import torch
from demo.support import ask

from hf_ddtree.demo import Run, StopSwitch
from hf_ddtree.demo.run import StopCriterion, stream


def test_stream_stops_the_generation_when_it_is_closed(loaded, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.run.REFRESH_SECONDS", 0)
    form, switch = ask(max_new_tokens=400), StopSwitch()
    runs = stream(loaded.model, switch, 0, **form.inputs(loaded), **form.settings())
    assert not next(runs).finished
    runs.close()  # waits for the thread
    assert switch.pressed


def test_stream_leaves_the_switch_alone_after_a_complete_run(loaded):
    form, switch = ask(), StopSwitch()
    *_, last = stream(loaded.model, switch, 0, **form.inputs(loaded), **form.settings())
    assert last.finished and len(last.token_ids) == 24 and not switch.pressed


def test_stop_criterion_stops_every_row_once_pressed():
    switch = StopSwitch()
    criterion, ids = StopCriterion(switch), torch.zeros(2, 3, dtype=torch.long)
    assert criterion(ids, None).tolist() == [False, False]
    switch.pressed = True
    assert criterion(ids, None).tolist() == [True, True]


def test_tokens_per_second_is_zero_before_the_first_token():
    assert Run().tokens_per_second == 0
    assert Run([1, 2, 3], seconds=2.0).tokens_per_second == 1.5
