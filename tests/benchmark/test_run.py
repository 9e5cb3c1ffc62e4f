"""Every method answers every prompt."""

import pytest
from helpers import char_tokenizer

import hf_ddtree
from hf_ddtree.benchmark.methods import methods
from hf_ddtree.benchmark.run import N_TIMED_PROMPTS, rows_by_prompt, warm_up
from hf_ddtree.testing import tiny_model


@pytest.fixture(scope="module")
def target():
    return hf_ddtree.enable(tiny_model("llama"))


def test_rows_by_prompt_times_the_stages_of_the_first_prompts_only(target):
    prompt = {"messages": [{"role": "user", "content": "ab"}], "kind": "all"}
    prompts = [(seed, prompt) for seed in (N_TIMED_PROMPTS - 1, N_TIMED_PROMPTS)]
    compared = methods(target, None, [4])
    first, second = rows_by_prompt(target, char_tokenizer(), prompts, compared, [0.0, 1.0], 4)
    assert [(row["pass"], row["temperature"]) for row in first] == [
        *[("speed", 0.0)] * 3,
        ("timing", 0.0),
        *[("speed", 1.0)] * 3,
        ("timing", 1.0),
    ]
    assert {row["pass"] for row in second} == {"speed"}


def test_warm_up_calls_every_method_once(target, monkeypatch):
    calls = []
    monkeypatch.setattr(target, "generate", lambda input_ids, **arguments: calls.append(arguments))
    warm_up(target, methods(target, None, [4, "auto"]))
    assert [arguments.get("tree_budget") for arguments in calls] == [None, None, 4, "auto"]
