"""The cost of verification as a function of the number of nodes and the length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.budget.cost import VerifyCost, convex_below
from hf_ddtree.target.timing import SIZES

SECONDS = st.lists(st.floats(0.001, 10), min_size=len(SIZES), max_size=len(SIZES))


@settings(max_examples=200, deadline=None)
@given(seconds=SECONDS)
def test_convex_below_is_convex_rises_and_stays_below_the_points(seconds):
    curve = np.array(convex_below(SIZES, seconds))
    slopes = np.diff(curve) / np.diff(SIZES)
    assert (slopes >= -1e-12).all() and (np.diff(slopes) >= -1e-9).all()
    assert (curve <= np.array(seconds) + 1e-12).all()


def test_convex_below_keeps_what_is_convex_already():
    seconds = [1.0 + 0.001 * n**1.5 for n in SIZES]
    assert convex_below(SIZES, seconds) == pytest.approx(seconds)


def test_seconds_between_and_beyond_what_was_measured():
    cost = VerifyCost([1, 3, 5], [10, 20], [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]])
    assert float(cost.seconds(1, 10)) == 1 and float(cost.seconds(2, 10)) == 1.5
    assert float(cost.seconds(7, 10)) == 6  # with the slope from 3 to 5
    assert float(cost.seconds(3, 15)) == 3 and float(cost.seconds(3, 30)) == 6
    assert float(cost.seconds(3, 1)) == 2, "no less than at the shorter length"
    assert cost.seconds(np.array([1, 2, 7]), 10).tolist() == [1, 1.5, 6]


def test_seconds_of_a_longer_text_are_never_fewer():
    cost = VerifyCost([1, 3], [10, 20], [[2.0, 4.0], [1.0, 5.0]])
    assert float(cost.seconds(1, 20)) == 2 and float(cost.seconds(3, 20)) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ([1], [10, 20], [[1.0], [1.0]]),
        ([1, 3], [10], [[1.0, 2.0]]),
        ([1, 3], [10, 20], [[1.0, 2.0]]),
        ([3, 1], [10, 20], [[1.0, 2.0]] * 2),
        ([1, 3], [10, 20], [[0.0, 2.0]] * 2),
        ([1, 3], [10, 20], [[1.0, float("inf")]] * 2),
    ],
)
def test_verify_cost_refuses_values_that_do_not_fit_together(arguments):
    with pytest.raises(ValueError, match="cost"):
        VerifyCost(*arguments)
