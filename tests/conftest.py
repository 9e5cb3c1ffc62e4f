"""Fixtures that several test files share."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Kernels run on the CPU. Triton reads this when torch first imports it.

import pytest
import torch

from hf_ddtree.embedded import load_embedded


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread: tiny models gain nothing from more, and a fixed number makes rounding reproducible."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedded():
    """Return the embedded model in fp32, plain, and its tokenizer. A test that enables the model disables it again."""
    model, tokenizer, _ = load_embedded()
    return model, tokenizer


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill what the kernel allocates with NaN, so an entry that it does not write is seen."""
    original = torch.Tensor.new_empty

    def new_empty(*args, **kwargs):
        tensor = original(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
