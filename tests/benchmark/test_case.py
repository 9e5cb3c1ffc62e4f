"""What every method gets."""

import torch
from benchmark.support import case
from helpers import char_tokenizer, random_ids

from hf_ddtree.benchmark.case import generation_settings, prompt_ids
from hf_ddtree.benchmark.methods import Method
from hf_ddtree.testing import tiny_model


def test_row_says_what_was_answered():
    row = case(tiny_model("llama"), random_ids(6), seed=3).row("speed", Method("tree 4", dict, 4))
    assert row == {
        "pass": "speed",
        "kind": "all",
        "seed": 3,
        "temperature": 0.0,
        "method": "tree 4",
        "tree_budget": 4,
        "prompt_tokens": 6,
    }


def test_prompt_ids_are_the_tokens_of_the_messages():
    tokenizer = char_tokenizer()
    prompt = {"messages": [{"role": "user", "content": "abc"}], "kind": "all"}
    expected = torch.tensor([tokenizer("abc")["input_ids"]])
    assert torch.equal(prompt_ids(tiny_model("llama"), tokenizer, prompt), expected)


def test_generation_settings_sample_the_full_vocabulary_above_zero():
    assert generation_settings(0.0, 5)["do_sample"] is False
    sampled = generation_settings(0.7, 5)
    assert sampled["do_sample"] is True and sampled["temperature"] == 0.7 and sampled["top_k"] == 0
