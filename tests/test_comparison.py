"""Comparing texts token by token, and scores by their rounding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ddtree.comparison import first_difference, ulp


@pytest.mark.parametrize(
    "tokens, expected, index",
    [
        ([], [], None),
        ([4, 5, 6], [4, 5, 6], None),
        ([4, 5, 6], [4, 9, 6], 1),
        ([9], [4], 0),
        ([4, 5], [4, 5, 6], 2),
        ([4, 5, 6], [4, 5], 2),
        ([], [4], 0),
    ],
)
def test_first_difference_is_the_first_index_that_differs(tokens, expected, index):
    assert first_difference(tokens, expected) == index


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_first_difference_splits_off_the_common_prefix(tokens, expected):
    index = first_difference(tokens, expected)
    assert index == first_difference(expected, tokens)
    if index is None:
        assert tokens == expected
    else:
        assert tokens[:index] == expected[:index] and tokens[index : index + 1] != expected[index : index + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 3.75, 0.5, 0.3, 17.0, 30.5])
@pytest.mark.parametrize("sign", [1, -1])
def test_ulp_is_the_distance_to_the_next_larger_number(value, sign, dtype):
    number = torch.tensor(value, dtype=dtype)
    following = torch.nextafter(number, torch.tensor(math.inf, dtype=dtype))
    assert ulp(sign * float(number), dtype) == float(following) - float(number)


def test_ulp_of_zero_is_that_of_one():
    assert ulp(0.0, torch.bfloat16) == ulp(1.0, torch.bfloat16) == 2**-7
