"""A streamer receives nothing from a request that is refused, and everything as before from one that is not."""

import threading

import pytest
import torch
from helpers import ROOT, char_tokenizer, generate, random_ids
from transformers import DynamicCache, GenerationConfig, StaticCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_ddtree
from hf_ddtree import checks
from hf_ddtree.streamer import HeldStreamer
from hf_ddtree.testing import ScriptedDrafter, tiny_dflash_drafter, tiny_model, truncated_copy

PROMPT = random_ids(12)
PADDED = torch.tensor([[0] * 2 + [1] * 10])


class Recording(BaseStreamer):
    """Keeps what it receives."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.fixture(scope="module")
def model():
    return hf_ddtree.enable(tiny_model("llama"))


def used_drafter() -> ScriptedDrafter:
    drafter = ScriptedDrafter(PROMPT[0].tolist())
    drafter.used = True
    return drafter


def offloaded_cache(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    return cache


def hybrid(model):
    return hf_ddtree.enable(tiny_model("lfm2"))


def dropout(model):
    return hf_ddtree.enable(tiny_model("llama", attention_dropout=0.5)).train()


# what the error must name, the arguments, and if it is not the usual one, the model
REFUSALS = {
    "a-batch": ("input_ids", lambda model: {"inputs": PROMPT.repeat(2, 1)}, None),
    "a-static-cache": ("cache", lambda model: {"cache": StaticCache(config=model.config, max_cache_len=64)}, None),
    "an-offloaded-cache": ("cache", lambda model: {"cache": offloaded_cache(model)}, None),
    "a-drafter-without-a-budget": ("tree_budget", lambda model: {"tree_budget": None, **dflash(model)}, None),
    "a-path": ("assistant_model", lambda model: {"assistant_model": "some/drafter"}, None),
    "training-mode": ("assistant_model", lambda model: {"assistant_model": truncated_copy(model, 2).train()}, None),
    "another-target": ("assistant_model", lambda model: dflash(model, hidden_size=16), None),
    "another-vocabulary": ("assistant_model", lambda model: {"assistant_model": tiny_model(vocab_size=900)}, None),
    "a-used-drafter": ("assistant_model", lambda model: {"assistant_model": used_drafter()}, None),
    "path-by-path": ("tree_attention", lambda model: {"tree_attention": "triton"}, hybrid),
    "a-mask-with-gaps": (
        "tree_attention",
        lambda model: {"tree_attention": "triton", "attention_mask": 1 - PADDED},
        None,
    ),
    "self-check": ("model.eval", lambda model: {}, dropout),
}


def dflash(model, **fields) -> dict:
    return {"assistant_model": tiny_dflash_drafter(model, **fields)}


@pytest.mark.parametrize("names, make_arguments, make_model", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("in_settings", [False, True], ids=["argument", "settings"])
def test_generate_refuses_before_the_streamer_receives_anything(model, names, make_arguments, make_model, in_settings):
    model, streamer = make_model(model) if make_model else model, Recording()
    arguments = {"inputs": PROMPT, "tree_budget": 8, **make_arguments(model)}
    if in_settings:  # the settings come second
        tree_options = {name: arguments.pop(name) for name in ("tree_budget", "tree_attention") if name in arguments}
        arguments = {**arguments, "generation_config": GenerationConfig(max_new_tokens=4, **tree_options)}
    else:
        arguments["max_new_tokens"] = 4
    with pytest.raises(ValueError, match=names):
        model.generate(streamer=streamer, **arguments)
    assert streamer.values == [] and streamer.ended == 0


ENABLE = (ROOT / "hf_ddtree" / "enable.py").read_text(encoding="utf-8")
CHECKS = sorted(name for name in vars(checks) if f"checks.{name}(" in ENABLE)
NOT_IN_A_TREE_CALL = {"check_class", "check_plain_arguments", "check_continuous_batching", "refuse_custom_generate"}


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in NOT_IN_A_TREE_CALL])
def test_generate_runs_every_check_before_the_streamer_receives_anything(model, monkeypatch, name):
    def refuse(*args, **kwargs):
        raise ValueError("refused here")

    monkeypatch.setattr(checks, name, refuse)
    streamer = Recording()
    options = {"tree_trace": True} if name == "check_options" else {"tree_budget": 8}
    with pytest.raises(ValueError, match="refused here"):
        model.generate(PROMPT, max_new_tokens=4, streamer=streamer, assistant_model=model, **options)
    assert streamer.values == [] and streamer.ended == 0


@pytest.mark.parametrize("settings", [None, {"tree_budget": 8}], ids=["argument", "settings"])
def test_generate_streams_what_plain_generate_streams(model, settings):
    plain, tree = Recording(), Recording()
    generate(model, PROMPT, max_new_tokens=8, streamer=plain)
    options = {"max_new_tokens": 8, "tree_budget": 8}
    if settings:  # passed by position
        torch.manual_seed(0)
        model.generate(PROMPT, GenerationConfig(**options), streamer=tree, assistant_model=model)
    else:
        generate(model, PROMPT, streamer=tree, assistant_model=model, **options)
    assert tree.values == plain.values and tree.ended == plain.ended == 1


@pytest.mark.parametrize("with_budget", [False, True])
def test_generate_hands_over_the_prompt_before_the_first_forward(model, with_budget):
    streamer, seen = Recording(), []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(list(streamer.values)))
    try:
        model.generate(PROMPT, max_new_tokens=2, tree_budget=8)  # the self-check passes with this hook
        seen.clear()
        model.generate(PROMPT, max_new_tokens=2, streamer=streamer, **({"tree_budget": 8} if with_budget else {}))
    finally:
        handle.remove()
    assert seen[0] == [PROMPT.tolist()]


def test_generate_feeds_a_reader_in_another_thread(model):
    streamer = TextIteratorStreamer(char_tokenizer(), timeout=60)
    options = {"inputs": PROMPT, "max_new_tokens": 8, "tree_budget": 8, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == char_tokenizer().decode(generate(model, PROMPT, max_new_tokens=8)[0])


def test_held_streamer_holds_the_first_value_back():
    received = Recording()
    held = HeldStreamer(received)
    held.put(torch.tensor([1, 2]))
    assert received.values == []
    assert held.release() is received and received.values == [[1, 2]]
    held.put(torch.tensor([3]))
    assert held.release() is received and received.values == [[1, 2], [3]]


def test_held_streamer_that_is_never_released_hands_everything_over():
    received = Recording()
    held = HeldStreamer(received)
    for token in (1, 2, 3):
        held.put(torch.tensor([token]))
    assert received.values == [[1], [2], [3]]
    held.end()
    assert received.ended == 1
    short = HeldStreamer(received)
    short.put(torch.tensor([4]))
    short.end()
    assert received.values[-1] == [4] and received.ended == 2
