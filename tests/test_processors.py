"""Every logits processor sees, with a tree, the calls it sees in plain `generate`, and gives the same tokens."""

import inspect
import json
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from helpers import generate, random_ids, scripted
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import GenerationMixin, configuration_utils, logits_process
from transformers.generation.configuration_utils import BaseWatermarkingConfig

import hf_ddtree
from hf_ddtree.testing import tiny_model

NEW_TOKENS = 20
EOS = 2
# the default top-k of 50 would hide what the other samplers do
DECODING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}


class CountingProcessor(LogitsProcessor):
    """Stateful in the crudest way: what it forbids depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 3, scores.shape[1], 3), -torch.inf)


class AutomatonProcessor(LogitsProcessor):
    """A grammar in miniature: its state advances by the last token, and it trusts that it sees every token once."""

    def __init__(self):
        self.state = 0

    def __call__(self, input_ids, scores):
        self.state = (self.state * 5 + int(input_ids[0, -1])) % 11
        return scores.index_fill(1, torch.arange(self.state % 4, scores.shape[1], 4), -torch.inf)


def far_from_the_last(batch_id, input_ids):
    """For `prefix_allowed_tokens_fn`: the next token differs from the last one by at least 3."""
    return [token for token in range(4, 40) if abs(token - int(input_ids[-1])) >= 3]


@dataclass
class Case:
    """A setting that brings a processor in.

    Args:
        id: what is tested.
        processor: the class that must be among the request's processors.
        settings: the setting; it may depend on the tokens that are generated when the model is left alone.
        base: what the request needs beside it. Without the setting but with `base` the outcome must be another one.
        sampled_only: greedy decoding ignores the setting.
        changes: what the setting must change at least, "tokens" or "scores".
        prompt_length: of the prompt.
    """

    id: str
    processor: str
    settings: Callable[[list[int]], dict]
    base: Callable[[list[int]], dict] = field(default=lambda tokens: {})
    sampled_only: bool = False
    changes: str = "tokens"
    prompt_length: int | None = None


def case(id, processor, settings, base=None, **options):
    """A `Case` whose settings may be given as a dict too."""

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


class Spy(LogitsProcessor):
    """Keeps a copy of what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        return scores


@dataclass
class Spied:
    """The processors of one request, and spies before the first and after the last of them."""

    classes: set[str] = field(default_factory=set)
    raw: Spy = field(default_factory=Spy)
    processed: Spy = field(default_factory=Spy)


@contextmanager
def spied_processors(model):
    """Put spies around the processors that transformers itself builds for a request."""
    spied = Spied()
    build = model._get_logits_processor

    def build_with_spies(*args, **kwargs):
        processors = build(*args, **kwargs)
        spied.classes |= {type(processor).__name__ for processor in processors}
        return LogitsProcessorList([spied.raw, *processors, spied.processed])

    with patch.object(model, "_get_logits_processor", build_with_spies):
        yield spied


def run(model, input_ids, **settings):
    """Generate from a fixed seed; returns the output and what the spies saw."""
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
    with spied_processors(model) as spied:
        output = generate(model, input_ids, seed=3, **settings)
    return output, spied


def has_effect(case, plain, expected, model, input_ids, base) -> bool:
    """Without the setting, other tokens or scores come out, or sampling is impossible."""
    try:
        output, spied = run(model, input_ids, **base)
    except RuntimeError:
        return True
    if case.changes == "tokens":
        return output.sequences.tolist() != plain.sequences.tolist()
    pairs = zip(spied.processed.calls, expected.processed.calls, strict=False)
    return any(not torch.equal(scores, expected_scores) for (_, scores), (_, expected_scores) in pairs)


def assert_same_calls(calls, expected):
    """Same number, order and prefixes; the logits up to rounding."""
    assert [ids.tolist() for ids, _ in calls] == [ids.tolist() for ids, _ in expected]
    for (_, logits), (_, expected_logits) in zip(calls, expected, strict=True):
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def models():
    """By drafter. With few kinds of tokens, a long prompt has seen most continuations, so that look-up hits too.

    The self-hash watermark of transformers needs 40 of them.
    """
    models = {"scripted": tiny_model("llama"), "look-up": tiny_model("llama", vocab_size=40, num_hidden_layers=2)}
    return {drafter: hf_ddtree.enable(model) for drafter, model in models.items()}


def tree_arguments(drafter: str, plain_output) -> dict:
    if drafter == "scripted":
        return {"tree_budget": 16, "assistant_model": scripted(plain_output.sequences)}
    return {"tree_budget": 64, "max_matching_ngram_size": 1}


CASES_BY_DECODING = [
    pytest.param(decoding, one, id=f"{one.id}-{decoding}")
    for one in CASES
    for decoding in DECODING
    if decoding == "sampled" or not one.sampled_only
]


@pytest.mark.parametrize("drafter", ["scripted", "look-up"])
@pytest.mark.parametrize("decoding, case", CASES_BY_DECODING)
def test_tokens_and_processor_calls_equal_plain_generate(models, drafter, decoding, case):
    model = models[drafter]
    default_length = 12 if drafter == "scripted" else 300
    input_ids = random_ids(case.prompt_length or default_length, vocab_size=40)
    decoding = DECODING[decoding]
    alone, _ = run(model, input_ids, **decoding)
    tokens = alone.sequences[0, input_ids.shape[1] :].tolist()
    base = {**decoding, **case.base(tokens)}

    plain, expected = run(model, input_ids, **{**base, **case.settings(tokens)})
    assert case.processor in expected.classes
    assert has_effect(case, plain, expected, model, input_ids, base)

    arguments = tree_arguments(drafter, plain)
    tree, spied = run(model, input_ids, **{**base, **case.settings(tokens), **arguments})
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert_same_calls(spied.raw.calls, expected.raw.calls)
    assert_same_calls(spied.processed.calls, expected.processed.calls)
    if drafter == "scripted" and len(spied.raw.calls) > 4:
        assert tree.tokens_per_round > 1.5


def test_look_up_accepts_tokens_so_that_its_cases_prove_something(models):
    output, _ = run(models["look-up"], random_ids(300, vocab_size=40), **tree_arguments("look-up", None))
    assert sum(r.accepted_length for r in output.rounds) >= 4


def test_every_processor_of_transformers_has_a_case():
    """Fails when a new version of transformers can put a processor in that no case above covers."""
    sources = [GenerationMixin._get_logits_processor]
    sources += [
        watermark.construct_processor
        for watermark in vars(configuration_utils).values()
        if inspect.isclass(watermark) and issubclass(watermark, BaseWatermarkingConfig)
    ]
    called = {name for source in sources for name in re.findall(r"\b([A-Z]\w*)\(", inspect.getsource(source))}
    processors = {
        name
        for name in called
        if inspect.isclass(value := getattr(logits_process, name, None)) and issubclass(value, LogitsProcessor)
    }
    assert len(processors) > 25  # the search above still finds them
    assert processors == {case.processor for case in CASES if hasattr(logits_process, case.processor)}


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("stateful", [CountingProcessor, AutomatonProcessor])
def test_a_stateful_processor_ends_in_the_same_state(models, stateful, decoding):
    model, input_ids = models["scripted"], random_ids(12)
    plain_processor, tree_processor = stateful(), stateful()
    plain, _ = run(model, input_ids, logits_processor=[plain_processor], **DECODING[decoding])
    arguments = tree_arguments("scripted", plain)
    tree, _ = run(model, input_ids, logits_processor=[tree_processor], **DECODING[decoding], **arguments)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert vars(tree_processor) == vars(plain_processor)


def test_the_state_is_that_of_the_emitted_tokens_when_eos_falls_inside_a_path(models):
    model, input_ids = models["scripted"], random_ids(12)
    alone, _ = run(model, input_ids)
    settings = {"eos_token_id": int(alone.sequences[0, 12 + 8])}
    plain_processor, tree_processor = Spy(), Spy()
    plain, _ = run(model, input_ids, logits_processor=[plain_processor], **settings)
    drafter = scripted(alone.sequences, hit_rate=1.0)  # it drafts past the end
    tree, _ = run(
        model, input_ids, logits_processor=[tree_processor], assistant_model=drafter, tree_budget=32, **settings
    )
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert_same_calls(tree_processor.calls, plain_processor.calls)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("decoding", DECODING)
def test_xgrammar_json_schema_equals_plain_generate(embedded, decoding):
    """A real grammar: xgrammar's matcher raises if it is fed a token that was not chosen, or misses one that was."""
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, which `make test` installs")
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    model, tokenizer = embedded
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    prompt = 'JSON of people: {"name": "Ada", "age": 36} {"name": "Alan", "age": 41} '
    input_ids = tokenizer(prompt, return_tensors="pt").input_ids
    settings = {"max_new_tokens": 24, "return_dict_in_generate": True, **DECODING[decoding]}

    plain = generate(model, input_ids, logits_processor=[GrammarProcessor(grammar)], **settings)
    hf_ddtree.enable(model)
    drafters = {"look-up": None, "scripted": scripted(plain.sequences)}
    for name, drafter in drafters.items():
        tree = generate(
            model,
            input_ids,
            logits_processor=[GrammarProcessor(grammar)],
            assistant_model=drafter,
            tree_budget=8,
            **settings,
        )
        assert tree.sequences.tolist() == plain.sequences.tolist(), name
        assert tree.tokens_per_round > 1, name
    hf_ddtree.disable(model)
    text = tokenizer.decode(plain.sequences[0, input_ids.shape[1] :], skip_special_tokens=True)
    person = json.loads(text)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)
