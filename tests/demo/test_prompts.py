"""The example prompts of the page."""

from hf_ddtree.demo.form import MAX_PROMPT_CHARACTERS
from hf_ddtree.demo.prompts import EXAMPLES


def test_examples_fit_into_the_form():
    assert all(text.strip() and len(text) <= MAX_PROMPT_CHARACTERS for text in EXAMPLES.values())


def test_examples_differ():
    assert len(set(EXAMPLES.values())) == len(EXAMPLES)
