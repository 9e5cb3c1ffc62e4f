"""examples/measure/sampling.py. tests/sampling/test_policies.py runs its check of each policy."""

import numpy as np
import pytest
from helpers import generate

from hf_ddtree.testing import tiny_model


@pytest.fixture
def expected() -> np.ndarray:
    return np.array([0.5, 0.3, 0.2])


def test_compare_accepts_a_sample_of_the_distribution(script, expected):
    counts = np.random.default_rng(1).multinomial(5000, expected)
    found = script("sampling").compare(counts, expected)
    assert found["total_variation"] < found["band"] and found["p_value"] > 1e-3


def test_compare_rejects_a_sample_of_another_distribution(script, expected):
    counts = np.random.default_rng(1).multinomial(5000, [0.4, 0.4, 0.2])
    found = script("sampling").compare(counts, expected)
    assert found["total_variation"] > found["band"] and found["p_value"] < 1e-3


def test_exact_distribution_covers_what_plain_generate_samples(script):
    sampling = script("sampling")
    special = {"pad_token_id": None, "bos_token_id": None}
    model = tiny_model("llama", vocab_size=sampling.VOCAB_SIZE, num_hidden_layers=1, initializer_range=0.15, **special)
    distribution = sampling.exact_distribution(model)
    assert sum(distribution.values()) == pytest.approx(1)
    for seed in range(20):
        output = generate(model, sampling.PROMPT, seed, **sampling.SAMPLING, max_new_tokens=sampling.N_TOKENS)
        assert tuple(output[0, sampling.PROMPT.shape[1] :].tolist()) in distribution
