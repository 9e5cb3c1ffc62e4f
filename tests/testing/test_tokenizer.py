"""The tokenizer of the small random models."""

from hf_ddtree.testing import VOCAB_SIZE, char_tokenizer


def test_char_tokenizer_has_one_character_per_token():
    tokenizer = char_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    text = tokenizer.decode(range(4, VOCAB_SIZE))
    assert len(text) == len(set(text)) == VOCAB_SIZE - 4
    assert tokenizer(text).input_ids == list(range(4, VOCAB_SIZE))
