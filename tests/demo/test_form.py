"""Forms: the limits of the page, and the arguments of `generate`."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from demo.support import ask

from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Form, Sampling
from hf_ddtree.demo.form import MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS
from hf_ddtree.request import MAX_TREE_BUDGET


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": " \n"}, "prompt is empty"),
        ({"text": "a" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt has 4001 characters"),
        ({"max_new_tokens": 0}, "max new tokens"),
        ({"max_new_tokens": MAX_NEW_TOKENS + 1}, "max new tokens"),
        ({"tree_budget": 0}, "tree budget"),
        ({"tree_budget": MAX_TREE_BUDGET + 1}, "tree budget"),
        ({"repetition_penalty": math.nan}, "repetition penalty"),
    ],
)
def test_form_refuses_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        ask(**options)


@pytest.mark.parametrize(
    "option", [{"temperature": 0}, {"top_p": 0}, {"top_k": -1}, {"seed": None}, {"seed": 2**32}, {"policy": "magic"}]
)
def test_sampling_refuses_values_out_of_range(option):
    with pytest.raises(ValueError, match=next(iter(option)).replace("_", "-")):
        Sampling(**option)


@pytest.mark.parametrize("positions", [None, 512])
def test_inputs_refuses_long_conversations(loaded, positions):
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=positions))
    loaded = replace(loaded, model=SimpleNamespace(config=config, device="cpu"))
    room = MAX_PROMPT_TOKENS if positions is None else positions - 24
    assert ask("a" * room).inputs(loaded)["input_ids"].shape[1] == room
    with pytest.raises(ValueError, match="Start a new conversation"):
        ask("a" * (room + 1)).inputs(loaded)


def test_inputs_contains_the_whole_conversation(loaded):
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    ids = Form(messages).inputs(loaded)["input_ids"][0].tolist()
    assert ids == [ord(character) for character in "ab\nc\nd"]


def test_policy_is_target_with_prompt_lookup():
    assert ask(sampling=Sampling(policy="swor")).policy == "target"
    assert ask(drafter=DRAFTER, sampling=Sampling(policy="swor")).policy == "swor"
    assert ask().policy is None


def test_settings_contains_the_sampling_options():
    settings = ask(sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3)).settings()
    assert settings["do_sample"] and (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.5, 0.9, 3)
    assert not ask().settings()["do_sample"] and "temperature" not in ask().settings()


VALUES = {
    "drafter": PROMPT_LOOKUP,
    "tree_budget": 5,
    "auto_budget": False,
    "max_new_tokens": 9,
    "repetition_penalty": 1.2,
    "dtype": "float32",
}
DRAWN = {"policy": "swor", "temperature": 0.3, "seed": 7, "top_p": 0.8, "top_k": 4}


def test_from_controls_reads_every_field():
    messages = [{"role": "user", "content": "hello"}]
    form = Form.from_controls(messages, VALUES)
    assert form == Form(messages, 9, 5, PROMPT_LOOKUP, 1.2)
    assert Form.from_controls(messages, {**VALUES, "auto_budget": True}).tree_budget == "auto"
    sampled = Form.from_controls(messages, VALUES | DRAWN)
    assert sampled == replace(form, sampling=Sampling(0.3, 0.8, 4, 7, "swor")) and sampled.seed == 7
