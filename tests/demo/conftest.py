"""The models of the demo's tests."""

import pytest
from demo.support import Letters

import hf_ddtree
from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Loaded
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


@pytest.fixture(scope="session")
def loaded():
    """A tiny target with an untrained DFlash drafter, in fp32."""
    model = hf_ddtree.enable(tiny_model("llama"))
    return Loaded(model, Letters(), {DRAFTER: tiny_dflash_drafter(model), PROMPT_LOOKUP: None})
