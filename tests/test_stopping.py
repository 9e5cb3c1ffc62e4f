"""Generation ends at the token where plain `generate` ends, wherever in a round that is, with the same cache."""

from collections import Counter
from functools import partial

import pytest
import torch
from helpers import assert_same_cache, char_tokenizer, generate, random_ids, scripted
from transformers import StoppingCriteria
from transformers.generation import stopping_criteria as transformers_criteria
from transformers.generation.streamers import BaseStreamer

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

PROMPT_LENGTH = 12
NEW_TOKENS = 20
TREE_BUDGET = 24
WINDOWED = ["mistral", "gemma3_text", "gpt_oss"]
# With a script that always hits, most stops fall inside a long path. With misses they also fall elsewhere.
HIT_RATES = [1.0, 0.6]
SEEDS = range(3)


class PutRecorder(BaseStreamer):
    """Keeps what was put, and counts how often it ended."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


class StopAfterToken(StoppingCriteria):
    """Ends at the `count`-th occurrence of a token among the last tokens that it was shown."""

    def __init__(self, token_id: int, count: int = 1):
        self.token_id, self.count, self.calls = token_id, count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids[0].tolist())
        self.count -= int(input_ids[0, -1]) == self.token_id
        return torch.full((input_ids.shape[0],), self.count <= 0)


class StopAtLength(StoppingCriteria):
    """Ends at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.fixture(scope="module")
def models():
    """Return enabled models by family."""
    return {family: hf_ddtree.enable(tiny_model(family)) for family in ["llama", *WINDOWED]}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


@pytest.fixture(scope="module")
def free_run(llama):
    """Return `[1, PROMPT_LENGTH + NEW_TOKENS + 4]`: what the model generates if nothing stops it.

    It is longer than any request, so a drafter that knows it drafts past every stop.
    """
    return generate(llama, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS + 4)


def new_tokens(sequence) -> list[int]:
    return sequence[0, PROMPT_LENGTH:].tolist()


def first_time(tokens: list[int]) -> list[int]:
    """Return the distinct tokens in order. Each of them, as EOS, ends the text at another place."""
    return list(dict.fromkeys(tokens))


def position_of_the_stop(tree_output) -> str:
    """Return where in its round the last token fell."""
    if not tree_output.rounds:
        return "prefill"
    last = tree_output.rounds[-1]
    on_a_node = last.tree.child(last.path[-1], int(tree_output.sequences[0, -1])) is not None
    if not on_a_node:
        return "bonus token"
    return "first node" if last.accepted_length == 0 else "inside a path"


def assert_same_end(model, free_run, settings, make_criteria=lambda: None) -> list[str]:
    """Assert that tree and plain agree in tokens, streamed values and cache. Return where each run stopped."""
    input_ids = free_run[:, :PROMPT_LENGTH]
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
    if "max_length" in settings:
        del settings["max_new_tokens"]
    streamed = PutRecorder()
    plain = generate(model, input_ids, streamer=streamed, stopping_criteria=make_criteria(), **settings)
    positions = []
    for hit_rate in HIT_RATES:
        for seed in SEEDS:
            streamer = PutRecorder()
            tree = generate(
                model,
                input_ids,
                streamer=streamer,
                stopping_criteria=make_criteria(),
                assistant_model=scripted(free_run, hit_rate, seed),
                tree_budget=TREE_BUDGET,
                tree_trace=True,
                **settings,
            )
            assert tree.sequences.tolist() == plain.sequences.tolist()
            assert streamer.puts == streamed.puts and streamer.ended == streamed.ended == 1
            assert_same_cache(tree.cache, plain.cache)
            positions.append(position_of_the_stop(tree))
    return positions


def test_generate_ends_at_eos_at_every_place_of_the_text(llama, free_run):
    """With each distinct token as EOS, stops fall on the prefill's token, nodes, inside paths and on bonus tokens."""
    positions = Counter()
    tokens = first_time(new_tokens(free_run)[:NEW_TOKENS])
    for token in tokens:
        positions.update(assert_same_end(llama, free_run, {"eos_token_id": token}))
    assert set(positions) == {"prefill", "first node", "inside a path", "bonus token"}
    assert positions["inside a path"] > len(tokens)


@pytest.mark.parametrize("order", ["later-first", "earlier-first", "one-that-never-comes"])
def test_generate_ends_at_the_first_of_several_eos_tokens(llama, free_run, order):
    early, late = first_time(new_tokens(free_run))[4], first_time(new_tokens(free_run))[9]
    never = next(token for token in range(4, 128) if token not in new_tokens(free_run))
    eos = {"later-first": [late, early], "earlier-first": [early, late], "one-that-never-comes": [never, late]}[order]
    assert_same_end(llama, free_run, {"eos_token_id": eos})


def test_generate_ends_at_the_eos_token_of_the_generation_config(llama, free_run, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "eos_token_id", first_time(new_tokens(free_run))[6])
    assert_same_end(llama, free_run, {})


@pytest.mark.parametrize("max_new_tokens", range(1, NEW_TOKENS + 1))
def test_generate_ends_after_max_new_tokens(llama, free_run, max_new_tokens):
    assert_same_end(llama, free_run, {"max_new_tokens": max_new_tokens})


@pytest.mark.parametrize("max_length", [PROMPT_LENGTH + 1, PROMPT_LENGTH + 2, PROMPT_LENGTH + 9])
def test_generate_ends_at_max_length(llama, free_run, max_length):
    assert_same_end(llama, free_run, {"max_length": max_length})


def test_generate_never_exceeds_max_new_tokens_with_any_drafter(llama, free_run):
    """The drafters that build their own trees are among them."""
    drafters = [None, tiny_model("llama", seed=1), llama, tiny_dflash_drafter(llama)]
    for max_new_tokens in range(1, 8):
        for drafter in drafters:
            settings = {"max_new_tokens": max_new_tokens, "assistant_model": drafter, "tree_budget": 8}
            sequence = generate(llama, free_run[:, :PROMPT_LENGTH], **settings)
            assert sequence.tolist() == free_run[:, : PROMPT_LENGTH + max_new_tokens].tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_generate_asks_a_custom_criterion_once_per_token(llama, free_run, count):
    """The criterion is stateful, so it would stop elsewhere if it were asked about rejected tokens, or twice."""
    tokens = new_tokens(free_run)[:NEW_TOKENS]
    token, occurrences = Counter(tokens).most_common(1)[0]
    assert occurrences >= count
    asked = []

    def make_criteria():
        asked.append(StopAfterToken(token, count))
        return [asked[-1]]

    assert_same_end(llama, free_run, {}, make_criteria)
    assert all(criterion.calls == asked[0].calls for criterion in asked)


@pytest.mark.parametrize("length", range(1, 12))
def test_generate_ends_by_a_custom_criterion_on_length(llama, free_run, length):
    assert_same_end(llama, free_run, {}, lambda: [StopAtLength(PROMPT_LENGTH + length)])


def test_generate_ends_at_the_first_of_several_criteria(llama, free_run):
    tokens = first_time(new_tokens(free_run))
    for settings, length in [
        ({"eos_token_id": tokens[7], "max_new_tokens": 15}, 12),
        ({"eos_token_id": tokens[12], "max_new_tokens": 15}, 5),
        ({"eos_token_id": tokens[12], "max_new_tokens": 4}, 9),
    ]:
        criteria = (StopAfterToken(tokens[14]), StopAtLength(PROMPT_LENGTH + length))
        assert_same_end(llama, free_run, settings, partial(list, criteria))


@pytest.mark.parametrize("first", range(0, 12, 2))
@pytest.mark.parametrize("n_characters", [1, 2, 4])
def test_generate_ends_at_stop_strings_of_several_tokens(llama, free_run, first, n_characters):
    """The string ends at a token of a path, and its beginning may lie in an earlier round."""
    tokenizer = char_tokenizer()
    text = tokenizer.decode(new_tokens(free_run)[first : first + n_characters])
    assert_same_end(llama, free_run, {"stop_strings": [text, "never this"], "tokenizer": tokenizer})


def test_generate_ends_at_stop_strings_inside_the_tokens_of_a_real_tokenizer(embedded):
    """Its tokens have several characters, so a string may end inside a token."""
    model, tokenizer = embedded
    inputs = tokenizer("Once upon a time, in a village by the sea, there", return_tensors="pt")
    free_run = generate(model, inputs.input_ids, max_new_tokens=24, do_sample=False)
    n_prompt = inputs.input_ids.shape[1]
    text = tokenizer.decode(free_run[0, n_prompt:])
    # these strings begin and end in the middle of words
    stop_strings = {"inside tokens": text[17:23], "first token": text[:2], "late": text[-9:-6]}
    hf_ddtree.enable(model)
    for name, stop_string in stop_strings.items():
        settings = {"max_new_tokens": 24, "do_sample": False, "stop_strings": stop_string, "tokenizer": tokenizer}
        plain = generate(model, inputs.input_ids, **settings)
        drafter = scripted(free_run, hit_rate=1.0)
        tree = generate(model, inputs.input_ids, assistant_model=drafter, tree_budget=12, **settings)
        assert tree.tolist() == plain.tolist(), name
        assert plain.shape[1] < free_run.shape[1], name
    hf_ddtree.disable(model)


class Clock:
    """A clock that stands still until it is told to advance, in place of the `time` module."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    def advance(self, *args):
        self.now += 1.0


@pytest.fixture
def one_second_per_forward(llama, monkeypatch):
    """Let every forward of the model take one second, so that nothing depends on the speed of the machine."""
    clock = Clock()
    monkeypatch.setattr(transformers_criteria, "time", clock)
    handle = llama.register_forward_hook(clock.advance)
    generate(llama, random_ids(2), max_new_tokens=2, tree_budget=1)  # runs the self-check, whose forwards do not count
    yield clock
    handle.remove()


@pytest.mark.parametrize("max_time", [0.5, 1.5, 3.5])
def test_generate_ends_within_the_round_that_crosses_max_time(llama, free_run, one_second_per_forward, max_time):
    start = one_second_per_forward.now
    drafter = scripted(free_run, hit_rate=1.0)
    settings = {"max_time": max_time, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    input_ids = free_run[:, :PROMPT_LENGTH]
    output = generate(llama, input_ids, assistant_model=drafter, tree_budget=TREE_BUDGET, **settings)
    assert one_second_per_forward.now - start == max_time + 0.5
    # the forward that crosses the limit still gives one token and no more, as in plain generate
    assert len(new_tokens(output.sequences)) == 1 + sum(r.accepted_length + 1 for r in output.rounds)
    assert not output.rounds or output.rounds[-1].accepted_length == 0
    assert output.sequences.tolist() == free_run[:, : output.sequences.shape[1]].tolist()


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 18])
def test_generate_leaves_plain_generates_rows_in_the_cache_of_a_windowed_model(models, family, max_new_tokens):
    model, ids = models[family], random_ids(PROMPT_LENGTH)
    script = generate(model, ids, max_new_tokens=max_new_tokens + 4)
    assert_same_end(model, script, {"max_new_tokens": max_new_tokens})


def test_generate_puts_no_node_past_the_last_learned_position():
    """EOS comes before the positions end, so plain generate never needs positions that a deep tree would need."""
    n_positions = PROMPT_LENGTH + NEW_TOKENS
    model = hf_ddtree.enable(tiny_model("gpt2", max_position_embeddings=n_positions))
    free_run = generate(model, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS)
    # the last token that did not occur before
    eos = first_time(new_tokens(free_run))[-1]
    longer = torch.cat([free_run, random_ids(20)], dim=1)
    assert_same_end(model, longer, {"eos_token_id": eos, "max_new_tokens": 2 * NEW_TOKENS})
