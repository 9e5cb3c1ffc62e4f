"""The settings that bring a logits processor into a request, one case each, for test_processors.py."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from helpers import random_ids
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

EOS = 2


class CountingProcessor(LogitsProcessor):
    """Forbids tokens by the number of its calls, so one call too many changes the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 3, scores.shape[1], 3), -torch.inf)


class AutomatonProcessor(LogitsProcessor):
    """Advances its state by the last token, as a grammar does: it must see every token exactly once."""

    def __init__(self):
        self.state = 0

    def __call__(self, input_ids, scores):
        self.state = (self.state * 5 + int(input_ids[0, -1])) % 11
        return scores.index_fill(1, torch.arange(self.state % 4, scores.shape[1], 4), -torch.inf)


def far_from_the_last(batch_id, input_ids):
    """Return the tokens that differ from the last one by at least 3, for `prefix_allowed_tokens_fn`."""
    return [token for token in range(4, 40) if abs(token - int(input_ids[-1])) >= 3]


@dataclass
class Case:
    """A setting that brings a processor in.

    Args:
        id: the name of the case.
        processor: the class that must be among the request's processors.
        settings: returns the setting, given the tokens that the model generates without it.
        base: returns what the request needs beside it. With `base` alone, the outcome must differ.
        sampled_only: whether greedy decoding ignores the setting.
        changes: what the setting must change, "tokens" or at least "scores".
        prompt_length: tokens of the prompt. None for the default.
    """

    id: str
    processor: str
    settings: Callable[[list[int]], dict]
    base: Callable[[list[int]], dict] = field(default=lambda tokens: {})
    sampled_only: bool = False
    changes: str = "tokens"
    prompt_length: int | None = None


def case(id, processor, settings, base=None, **options):
    """Return a `Case`. Its settings may also be given as dicts."""

    def as_function(value):
        return value if callable(value) else lambda tokens: value or {}

    return Case(id, processor, as_function(settings), as_function(base), **options)


def eos_in_the_middle(tokens):
    return {"eos_token_id": tokens[6]}


CASES = [
    case("repetition_penalty", "RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 2.0}),
    case(
        "encoder_repetition_penalty",
        "EncoderRepetitionPenaltyLogitsProcessor",
        {"encoder_repetition_penalty": 3.0},
        prompt_length=6,
    ),
    case("no_repeat_ngram_size-1", "NoRepeatNGramLogitsProcessor", {"no_repeat_ngram_size": 1}, prompt_length=1),
    case("no_repeat_ngram_size-2", "NoRepeatNGramLogitsProcessor", {"no_repeat_ngram_size": 2}, changes="scores"),
    case(
        "encoder_no_repeat_ngram_size",
        "EncoderNoRepeatNGramLogitsProcessor",
        {"encoder_no_repeat_ngram_size": 1},
        prompt_length=6,
    ),
    case(
        "bad_words_ids",
        "NoBadWordsLogitsProcessor",
        lambda tokens: {"bad_words_ids": [[tokens[9]], [tokens[2], tokens[3]], tokens[5:8]]},
    ),
    case(
        "sequence_bias",
        "SequenceBiasLogitsProcessor",
        lambda tokens: {"sequence_bias": {(tokens[8],): -9.0, (tokens[3], tokens[4]): -9.0, (5,): 1.0}},
    ),
    case("min_length", "MinLengthLogitsProcessor", {"min_length": 22}, eos_in_the_middle, prompt_length=10),
    case("min_new_tokens", "MinNewTokensLengthLogitsProcessor", {"min_new_tokens": 12}, eos_in_the_middle),
    case(
        "prefix_allowed_tokens_fn",
        "PrefixConstrainedLogitsProcessor",
        {"prefix_allowed_tokens_fn": far_from_the_last},
    ),
    # a prompt of one token, because the forced token must be the second of the sequence
    case("forced_bos_token_id", "ForcedBOSTokenLogitsProcessor", {"forced_bos_token_id": 7}, prompt_length=1),
    case("forced_eos_token_id", "ForcedEOSTokenLogitsProcessor", {"forced_eos_token_id": EOS}),
    case(
        "remove_invalid_values",
        "InfNanRemoveLogitsProcessor",
        {"remove_invalid_values": True},
        {"sequence_bias": {(5,): float("nan")}},
    ),
    case(
        "exponential_decay_length_penalty",
        "ExponentialDecayLengthPenalty",
        {"exponential_decay_length_penalty": (4, 2.0)},
        lambda tokens: {"eos_token_id": next(token for token in range(4, 40) if token not in tokens)},
    ),
    case("suppress_tokens", "SuppressTokensLogitsProcessor", lambda tokens: {"suppress_tokens": tokens[3:5]}),
    case(
        "begin_suppress_tokens",
        "SuppressTokensAtBeginLogitsProcessor",
        lambda tokens: {"begin_suppress_tokens": tokens[:2]},
    ),
    case("guidance_scale", "UnbatchedClassifierFreeGuidanceLogitsProcessor", {"guidance_scale": 2.0}),
    case(
        "guidance_scale-negative_prompt_ids",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        {"guidance_scale": 2.0, "negative_prompt_ids": random_ids(7, seed=5, vocab_size=40)},
        {"guidance_scale": 2.0},
    ),
    case("temperature", "TemperatureLogitsWarper", {"temperature": 0.5}, sampled_only=True),
    case("top_k", "TopKLogitsWarper", {"top_k": 3}, sampled_only=True),
    case("top_p", "TopPLogitsWarper", {"top_p": 0.5}, sampled_only=True),
    case("top_h", "TopHLogitsWarper", {"top_h": 0.3}, sampled_only=True),
    case("min_p", "MinPLogitsWarper", {"min_p": 0.5}, sampled_only=True),
    case("typical_p", "TypicalLogitsWarper", {"typical_p": 0.4}, sampled_only=True),
    case("epsilon_cutoff", "EpsilonLogitsWarper", {"epsilon_cutoff": 0.1}, sampled_only=True),
    case("eta_cutoff", "EtaLogitsWarper", {"eta_cutoff": 0.3}, sampled_only=True),
    case(
        "watermarking_config-greenlist",
        "WatermarkLogitsProcessor",
        {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=2)},
    ),
    case(
        "watermarking_config-selfhash",
        "WatermarkLogitsProcessor",
        {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    ),
    case(
        "watermarking_config-SynthID",
        "SynthIDTextWatermarkLogitsProcessor",
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340])},
        changes="scores",
    ),
    case("renormalize_logits", "LogitNormalization", {"renormalize_logits": True}, changes="scores"),
    case("custom-counting", "CountingProcessor", lambda tokens: {"logits_processor": [CountingProcessor()]}),
    case("custom-automaton", "AutomatonProcessor", lambda tokens: {"logits_processor": [AutomatonProcessor()]}),
    # several together, in transformers' own order around the custom one
    case(
        "all-together",
        "TopPLogitsWarper",
        lambda tokens: {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": tokens[:1],
            "logits_processor": [AutomatonProcessor()],
            "temperature": 0.7,
            "top_k": 10,
            "top_p": 0.9,
            "renormalize_logits": True,
        },
        sampled_only=True,
    ),
]
