"""The layer types that a target may have."""

import pytest

from hf_ddtree.target.layer_types import INCONSISTENT_MODEL_TYPES, MASKED_LAYER_TYPES, RECURRENT_LAYER_TYPES
from hf_ddtree.testing import FAMILIES, FURTHER_FAMILIES, GATED_DELTA_FAMILIES, RECURRENT_FAMILIES, tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER_FAMILIES, *GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES])
def test_layer_types_admit_every_supported_family(family):
    config = tiny_model(family).config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    assert layer_types <= {*MASKED_LAYER_TYPES, *RECURRENT_LAYER_TYPES}
    assert config.model_type not in INCONSISTENT_MODEL_TYPES


def test_layer_types_are_masked_or_recurrent_but_not_both():
    assert not set(MASKED_LAYER_TYPES) & set(RECURRENT_LAYER_TYPES)
