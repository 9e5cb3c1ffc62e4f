"""Requests under process-wide defaults that the user has set: `torch.set_default_dtype` and `torch.set_default_device`.

The models are made before. The device "meta" stands for any device other than the model's own: a tensor that is made on
it by mistake has no values, so every use of it fails.
"""

from collections.abc import Callable

import pytest
import torch
from helpers import generate, process_default, random_ids, scripted, write_speculators_drafter
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree import POLICIES
from hf_ddtree.testing import VOCAB_SIZE, WINDOW, tiny_dflash_drafter, tiny_model

DEFAULTS = [torch.bfloat16, torch.float16, torch.float64, "meta"]
PROMPT = random_ids(WINDOW + 4, seed=1)  # longer than the window, so the window matters from the first round on
GREEDY = {"max_new_tokens": 8, "do_sample": False}
SAMPLED = {"max_new_tokens": 8, "do_sample": True}
DRAWING = ["DFlash", "speculators", "causal LM"]  # drafters that draw children
# Sliding layers of a drafter have a cache with a number of its own.
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> dict[str, Callable]:
    """Return, by kind, a function that makes a drafter from the sequence that it may know."""
    target, kept = tiny_model("llama"), torch.arange(1, VOCAB_SIZE, 3)
    folder = write_speculators_drafter(tmp_path_factory.mktemp("drafter"), target, kept, layers=SLIDING)
    models = {
        "DFlash": tiny_dflash_drafter(target),
        "speculators": hf_ddtree.load_drafter(folder),
        "causal LM": tiny_model("llama", seed=1, num_hidden_layers=2),
    }
    return {
        **{kind: lambda sequence, model=model: model for kind, model in models.items()},
        "look-up": lambda sequence: None,
        "scripted": scripted,
    }


@pytest.fixture(scope="module")
def without_default(drafters) -> dict[tuple[str, str], list]:
    """Return what each drafter that draws samples with each policy, before any default is set."""
    target = hf_ddtree.enable(tiny_model("llama"))
    return {
        (kind, policy): generate(target, PROMPT, **SAMPLED, **options(drafters[kind](None), policy)).tolist()
        for kind in DRAWING
        for policy in POLICIES
    }


def options(drafter, policy: str = "target") -> dict:
    return {"assistant_model": drafter, "tree_budget": 6, "tree_sampling": policy}


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_generate_equals_plain_decoding_with_every_drafter_under_every_default(default, drafters):
    target = hf_ddtree.enable(tiny_model("llama"))
    with process_default(default):
        for settings in (GREEDY, SAMPLED):
            plain = generate(target, PROMPT, **settings)
            for make_drafter in drafters.values():
                output = generate(target, PROMPT, **settings, **options(make_drafter(plain)))
                assert output.tolist() == plain.tolist()


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_generate_samples_the_same_with_every_policy_under_every_default(default, drafters, without_default):
    target = hf_ddtree.enable(tiny_model("llama"))
    with process_default(default):
        for (kind, policy), expected in without_default.items():
            output = generate(target, PROMPT, **SAMPLED, **options(drafters[kind](None), policy))
            assert output.tolist() == expected, (kind, policy)


# windows, Gated DeltaNet, path by path
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_generate_equals_plain_decoding_with_every_verifier_under_every_default(default, family, drafters):
    target = hf_ddtree.enable(tiny_model(family))
    config = target.config.get_text_config(decoder=True)
    # On "meta", plain generate itself cannot make a cache for layers of these kinds, so the cache is made before.
    caches = [DynamicCache(config=config) for _ in range(3)]
    with process_default(default):
        plain = generate(target, PROMPT, cache=caches.pop(), **SAMPLED)
        for kind in ("scripted", "DFlash"):
            output = generate(target, PROMPT, cache=caches.pop(), **SAMPLED, **options(drafters[kind](plain)))
            assert output.tolist() == plain.tolist()


def test_generate_equals_plain_decoding_with_the_kernel_under_a_default_device():
    pytest.importorskip("triton", reason="needs Triton, which does not exist for macOS")
    one_head = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    target = hf_ddtree.enable(tiny_model("llama", **one_head))
    with process_default("meta"):
        plain = generate(target, PROMPT[:, :4], max_new_tokens=3)
        tree = {"assistant_model": scripted(plain, hit_rate=1.0), "tree_budget": 2, "tree_attention": "triton"}
        assert generate(target, PROMPT[:, :4], max_new_tokens=3, **tree).tolist() == plain.tolist()


@pytest.mark.parametrize("default", [torch.bfloat16, "meta"], ids=str)
def test_generate_auto_equals_plain_decoding_under_a_default(default, drafters, tmp_path, monkeypatch):
    """The calibration makes texts, caches and positions of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = hf_ddtree.enable(tiny_model("gemma3_text", max_position_embeddings=40))
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    with process_default(default):
        plain = generate(target, PROMPT, cache=caches.pop(), **SAMPLED)
        tree = options(drafters["DFlash"](plain)) | {"tree_budget": "auto"}
        assert generate(target, PROMPT, cache=caches.pop(), **SAMPLED, **tree).tolist() == plain.tolist()
