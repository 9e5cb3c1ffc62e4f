"""examples/measure/chats.py."""

import json
import sys

import pytest
from helpers import char_tokenizer

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, truncated_copy


def turns(*counts: tuple[int, int]) -> list:
    return [(emitted, rounds, [5] * emitted) for emitted, rounds in counts]


# the returned cache loses 10% in the second turn
FULL, LESS = turns((8, 4), (20, 5)), turns((8, 4), (18, 5))


def test_main_finds_that_the_returned_cache_equals_a_full_prefill(script, monkeypatch, capsys):
    chats = script("chats")
    model, tokenizer = hf_ddtree.enable(tiny_model("llama")), char_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
    monkeypatch.setattr(chats, "load_models", lambda **names: (model, tokenizer, tiny_dflash_drafter(model)))
    monkeypatch.setattr(chats, "truncated_copy", lambda model, num_layers: truncated_copy(model, 3))
    monkeypatch.setattr(sys, "argv", ["chats.py", "--chats", "1", "--turns", "2", "--max-new-tokens", "12"])
    with pytest.raises(SystemExit) as status:
        chats.main()
    assert not status.value.code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = ["dflash/related", "dflash/unrelated", "truncated/related", "truncated/unrelated"]
    assert found["returned_to_full"] == dict.fromkeys(cases, 1.0) and found["texts_equal"]


@pytest.mark.parametrize("returned, ratio", [(FULL, 1.0), (LESS, 0.9)])
def test_main_fails_if_the_returned_cache_accepts_less(returned, ratio, script, monkeypatch, capsys):
    chats = script("chats")
    monkeypatch.setattr(chats, "load_models", lambda **names: (None, None, None))
    monkeypatch.setattr(chats.hf_ddtree, "enable", lambda model: model)
    monkeypatch.setattr(chats, "truncated_copy", lambda model, num_layers: None)
    by_way = {"full": [FULL], "returned": [returned], "copied": [FULL]}
    monkeypatch.setattr(chats, "measure", lambda *args: {("dflash", "related"): by_way})
    monkeypatch.setattr(sys, "argv", ["chats.py"])
    with pytest.raises(SystemExit) as status:
        chats.main()
    assert bool(status.value.code) == (ratio != 1)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["returned_to_full"] == {"dflash/related": ratio}
    assert lines[2] == "| dflash | related | full | 2.00 | 4.00 | 4.00 |"


def test_messages_of_a_related_chat_follow_up_and_of_another_one_ask_on(script):
    chats = script("chats")
    questions = script("prompts").read_questions()
    assert chats.messages_of(2, "related", 5) == [questions[6], *chats.FOLLOW_UPS, chats.FOLLOW_UPS[0]]
    assert chats.messages_of(7, "unrelated", 4) == [*questions[21:], questions[0]]


def test_next_message_continues_the_tokens_of_a_chat(script, embedded):
    _, tokenizer = embedded
    start = script("prompts").chat_inputs(tokenizer, "Who are you?")["input_ids"][0].tolist()
    roles, contents = ["user", "assistant", "user"], ["Who are you?", "A model.", "Please write that again."]
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    answer = tokenizer("A model.", add_special_tokens=False)["input_ids"]
    assert start + answer + script("chats").next_message(tokenizer, contents[2])[0].tolist() == whole
