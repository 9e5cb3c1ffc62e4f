"""What several test files share."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads it when it is first imported, by torch

import pytest
import torch

from hf_ddtree.embedded import load_embedded


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models gain nothing from threads, and a fixed number makes rounding reproducible."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedded():
    """The embedded model in fp32, plain, and its tokenizer. Disable the model again after enabling it."""
    model, tokenizer, _ = load_embedded()
    return model, tokenizer
