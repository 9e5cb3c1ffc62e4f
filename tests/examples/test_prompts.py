"""examples/measure/prompts.py."""

from helpers import char_tokenizer


def test_read_questions_returns_distinct_texts(script):
    questions = script("prompts").read_questions()
    assert len(questions) == len(set(questions)) == 24


def test_chat_inputs_end_with_the_beginning_of_the_answer(script):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}!{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    inputs = script("prompts").chat_inputs(tokenizer, "abc")
    assert tokenizer.decode(inputs["input_ids"][0]) == "abc!>"
