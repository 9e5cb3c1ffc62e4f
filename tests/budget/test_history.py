"""What is remembered of earlier rounds: averages, acceptance by estimate, and for whom."""

import gc
import weakref

import numpy as np
import pytest

from hf_ddtree.budget.history import MAX_CARRIED_WEIGHT, AcceptanceByEstimate, History, MovingAverage, history_of
from hf_ddtree.testing import ScriptedDrafter, tiny_dflash_drafter, tiny_model


def test_expected_is_corrected_by_what_was_accepted():
    acceptance, log_reach = AcceptanceByEstimate(), np.log([0.9, 0.6, 0.2, 0.001])
    before = acceptance.expected(log_reach)
    often = 20  # nodes of each estimate in a round, so that the prior weighs little
    for _ in range(400):  # A third of the first two is accepted, two thirds of the third, and the last one never.
        for hits in ([True, False, False, False], [False, False, True, False], [False, False, True, False]):
            acceptance.update(np.repeat(log_reach, often), np.repeat(hits, often))
    after = acceptance.expected(log_reach)
    assert after[0] + after[1] == pytest.approx(1 / 3, rel=0.02) and after[2] == pytest.approx(2 / 3, rel=0.02)
    assert after[3] < before[3]


def test_expected_of_an_estimate_not_seen_yet_is_corrected_like_the_others():
    acceptance = AcceptanceByEstimate()
    unseen = np.log([0.01])
    for _ in range(50):
        acceptance.update(np.log([0.9, 0.8, 0.7]), np.array([False] * 3))
    assert acceptance.expected(unseen)[0] < 0.1 * AcceptanceByEstimate().expected(unseen)[0]


def test_expected_forgets_what_was_seen_long_ago():
    acceptance, log_reach = AcceptanceByEstimate(), np.log([0.9, 0.8])
    for hits in ([False] * 2, [True] * 2):
        for _ in range(500):
            acceptance.update(log_reach, np.array(hits))
    assert acceptance.expected(log_reach).sum() == pytest.approx(2, rel=0.1)


def test_moving_average_weighs_older_rounds_less():
    average = MovingAverage()
    for value in [1.0] * 50 + [3.0] * 50:
        average.update(value)
    assert average.value == pytest.approx(3, abs=0.01)


def test_moving_average_holds_the_initial_value_until_the_first_update():
    average = MovingAverage(5.0)
    assert average.value == 5.0
    average.update(1.0)
    assert average.value == 1.0


def test_begin_request_limits_the_weight_of_the_gains():
    history = History()
    for average in (history.tokens, history.seconds, history.scale):
        for _ in range(50):
            average.update(2.0)
    scale = history.scale.weight
    history.begin_request()
    assert history.tokens.weight == history.seconds.weight == MAX_CARRIED_WEIGHT < scale == history.scale.weight
    history.tokens.update(0.0)
    assert history.tokens.value == pytest.approx(2 * 0.95 * 4 / (0.95 * 4 + 1))


def test_history_of_is_one_per_drafter_target_and_temperature():
    model, other = tiny_model("llama"), tiny_model("llama")
    drafter = tiny_dflash_drafter(model)
    keys = [
        (drafter, model, 0.7),
        (drafter, model, 0.0),
        (drafter, other, 0.7),
        (tiny_dflash_drafter(model), model, 0.7),
    ]
    histories = [history_of(*key) for key in keys]
    assert len(set(map(id, histories))) == 4
    assert all(history_of(*key) is history for key, history in zip(keys, histories, strict=True))


def test_history_of_is_bounded_over_all_temperatures():
    model = tiny_model("llama")
    drafter = tiny_dflash_drafter(model)
    temperatures = [0.0, *np.geomspace(1e-4, 100, 500)]
    histories = [history_of(drafter, model, float(temperature)) for temperature in temperatures]
    assert len(set(map(id, histories))) == 21
    assert histories[0] not in histories[1:]  # greedy decoding has its own
    assert history_of(drafter, model, 0.7) is history_of(drafter, model, 0.74) is not history_of(drafter, model, 0.8)


@pytest.mark.parametrize("drafter", [None, ScriptedDrafter([5])], ids=["look-up", "of one's own"])
def test_history_of_anything_but_a_model_is_empty(drafter):
    model = tiny_model("llama")
    assert history_of(drafter, model, 0.0) is not history_of(drafter, model, 0.0)


def test_history_of_keeps_no_model_alive():
    model = tiny_model("llama")
    drafter = tiny_dflash_drafter(model)
    gone = [weakref.ref(history_of(drafter, model, 0.0)), weakref.ref(model), weakref.ref(drafter)]
    del model, drafter
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
