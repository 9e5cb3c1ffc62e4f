"""Small random models and drafters of every supported kind, for tests of this package and of code built on it."""

from .drafters import ScriptedDrafter, tiny_dflash_drafter, tiny_muse_glimmer_drafter
from .families import (
    ALL_FAMILIES,
    FAMILIES,
    FURTHER_FAMILIES,
    GATED_DELTA_FAMILIES,
    INCONSISTENT_FAMILIES,
    RECURRENT_FAMILIES,
    VOCAB_SIZE,
    WINDOW,
)
from .models import tiny_model, truncated_copy
from .tokenizer import char_tokenizer

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "FURTHER_FAMILIES",
    "GATED_DELTA_FAMILIES",
    "INCONSISTENT_FAMILIES",
    "RECURRENT_FAMILIES",
    "VOCAB_SIZE",
    "WINDOW",
    "ScriptedDrafter",
    "char_tokenizer",
    "tiny_dflash_drafter",
    "tiny_model",
    "tiny_muse_glimmer_drafter",
    "truncated_copy",
]
