"""A tokenizer for the small random models."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .families import VOCAB_SIZE


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one character per token of the tiny models. The ids 0 to 3 are special tokens."""
    special = ["<pad>", "<s>", "</s>", "<mask>"]
    characters = list(string.ascii_letters + string.digits + string.punctuation + " ")
    # Greek letters, so that every id of the model has a character
    characters += [chr(0x391 + i) for i in range(VOCAB_SIZE - len(special) - len(characters))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(special + characters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
