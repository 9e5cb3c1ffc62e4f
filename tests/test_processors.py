"""With a tree, every logits processor gets the calls that plain `generate` makes, and gives the same tokens."""

import inspect
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from helpers import generate, random_ids, scripted
from processor_cases import CASES, AutomatonProcessor, CountingProcessor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerationMixin, configuration_utils, logits_process
from transformers.generation.configuration_utils import BaseWatermarkingConfig

import hf_ddtree
from hf_ddtree.testing import tiny_model

NEW_TOKENS = 20
# the default top-k of 50 would hide what other warpers do
DECODING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}


class SpyProcessor(LogitsProcessor):
    """Keeps a copy of the prefix and the logits of each call."""

    def __init__(self):
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        return scores


@dataclass
class Spied:
    """The processors of one request, and spies before the first and after the last of them."""

    classes: set[str] = field(default_factory=set)
    raw: SpyProcessor = field(default_factory=SpyProcessor)
    processed: SpyProcessor = field(default_factory=SpyProcessor)


@contextmanager
def spied_processors(model):
    """Put spies around the processors that transformers builds for a request, and yield what they see."""
    spied = Spied()
    build = model._get_logits_processor

    def build_with_spies(*args, **kwargs):
        processors = build(*args, **kwargs)
        spied.classes |= {type(processor).__name__ for processor in processors}
        return LogitsProcessorList([spied.raw, *processors, spied.processed])

    with patch.object(model, "_get_logits_processor", build_with_spies):
        yield spied


def run(model, input_ids, **settings):
    """Generate from a fixed seed. Return the output and what the spies saw."""
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
    with spied_processors(model) as spied:
        output = generate(model, input_ids, seed=3, **settings)
    return output, spied


def has_effect(case, plain, expected, model, input_ids, base) -> bool:
    """Return whether tokens or scores differ without the setting, or sampling is impossible without it."""
    try:
        output, spied = run(model, input_ids, **base)
    except RuntimeError:
        return True
    if case.changes == "tokens":
        return output.sequences.tolist() != plain.sequences.tolist()
    pairs = zip(spied.processed.calls, expected.processed.calls, strict=False)
    return any(not torch.equal(scores, expected_scores) for (_, scores), (_, expected_scores) in pairs)


def assert_same_calls(calls: list, expected: list) -> None:
    """Assert that a processor saw equally many calls with the same prefixes in the same order, and equal logits."""
    assert [ids.tolist() for ids, _ in calls] == [ids.tolist() for ids, _ in expected]
    for (_, logits), (_, expected_logits) in zip(calls, expected, strict=True):
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def models():
    """Return the enabled model of each drafter.

    Look-up hits if the vocabulary is small and the prompt long. The self-hash watermark needs 40 tokens.
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
def test_generate_calls_processors_as_plain_generate_does(models, drafter, decoding, case):
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


def test_look_up_cases_accept_tokens(models):
    output, _ = run(models["look-up"], random_ids(300, vocab_size=40), **tree_arguments("look-up", None))
    assert sum(r.accepted_length for r in output.rounds) >= 4


def test_cases_cover_every_processor_of_transformers():
    """A new release of transformers may bring a processor that no case covers."""
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
    assert len(processors) > 25  # the search still finds them
    assert processors == {case.processor for case in CASES if hasattr(logits_process, case.processor)}


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("stateful", [CountingProcessor, AutomatonProcessor])
def test_generate_leaves_a_stateful_processor_in_the_same_state(models, stateful, decoding):
    model, input_ids = models["scripted"], random_ids(12)
    plain_processor, tree_processor = stateful(), stateful()
    plain, _ = run(model, input_ids, logits_processor=[plain_processor], **DECODING[decoding])
    arguments = tree_arguments("scripted", plain)
    tree, _ = run(model, input_ids, logits_processor=[tree_processor], **DECODING[decoding], **arguments)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert vars(tree_processor) == vars(plain_processor)


def test_generate_calls_no_processor_after_eos_inside_a_path(models):
    model, input_ids = models["scripted"], random_ids(12)
    alone, _ = run(model, input_ids)
    settings = {"eos_token_id": int(alone.sequences[0, 12 + 8])}
    plain_processor, tree_processor = SpyProcessor(), SpyProcessor()
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
def test_generate_follows_a_json_schema_of_xgrammar(embedded, decoding):
    """xgrammar's matcher raises an error if it gets a token that was not chosen, or misses one that was."""
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
