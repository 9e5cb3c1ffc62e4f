"""Prompts from files and from the target."""

import pytest
import torch
from helpers import char_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree.training.prompts import MIN_USER_TOKENS, read_prompts, self_instruct, tokenize


def test_read_prompts_drops_the_answers_of_a_chat(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "kind": "text"}\n\n{"messages": [{"role": "user", "content": "b"}, '
        '{"role": "assistant", "content": "c"}]}\n'
    )
    assert read_prompts(str(path)) == [
        {"messages": [{"role": "user", "content": "a"}], "kind": "text"},
        {"messages": [{"role": "user", "content": "b"}], "kind": "all"},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "entry 2 has no prompt"),
        ('{"prompt": 3}', "entry 2 has no prompt"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "entry 2 has no prompt"),
    ],
)
def test_read_prompts_names_the_line_without_a_prompt(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}')
    with pytest.raises(ValueError, match=f"prompts.jsonl, {message}"):
        read_prompts(str(path))


def test_tokenize_joins_messages_without_a_chat_template():
    tokenizer = char_tokenizer()
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    assert tokenize(tokenizer, messages) == tokenizer("ab\nc")["input_ids"]


def test_self_instruct_returns_whole_user_turns(target_folder):
    model, tokenizer = (kind.from_pretrained(target_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(0)
    prompts = self_instruct(model, tokenizer, 64)
    assert 0 < len(prompts) < 64
    for prompt in prompts:
        assert prompt[0] == 1 and prompt[-2:] == [2, 3] and 2 not in prompt[1:-2]
        assert len(prompt) - 3 >= MIN_USER_TOKENS


def test_self_instruct_refuses_a_tokenizer_without_a_chat_template():
    with pytest.raises(ValueError, match=r"no chat template.*--prompts"):
        self_instruct(None, char_tokenizer(), 1)
