"""The config fields of the small models."""

import pytest

from hf_ddtree.target.layer_types import INCONSISTENT_MODEL_TYPES
from hf_ddtree.testing import (
    ALL_FAMILIES,
    FAMILIES,
    FURTHER_FAMILIES,
    GATED_DELTA_FAMILIES,
    INCONSISTENT_FAMILIES,
    RECURRENT_FAMILIES,
)


def test_all_families_holds_every_group_once():
    groups = (FAMILIES, FURTHER_FAMILIES, GATED_DELTA_FAMILIES, RECURRENT_FAMILIES, INCONSISTENT_FAMILIES)
    assert len(ALL_FAMILIES) == sum(map(len, groups))


@pytest.mark.parametrize("model_type", INCONSISTENT_MODEL_TYPES)
def test_inconsistent_families_hold_every_refused_model_type(model_type):
    assert model_type in INCONSISTENT_FAMILIES
