"""Generation ends at the token where plain `generate` ends, wherever in a round that is, and leaves nothing behind."""

from collections import Counter

import pytest
import torch
from helpers import char_tokenizer, generate, random_ids, scripted
from transformers import DynamicCache, StoppingCriteria
from transformers.generation import stopping_criteria as transformers_criteria
from transformers.generation.streamers import BaseStreamer

import hf_ddtree
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model

PROMPT_LENGTH = 12
NEW_TOKENS = 20
TREE_BUDGET = 24
WINDOWED = ["mistral", "gemma3_text", "gpt_oss"]
# a script that always hits makes long paths, so that most stops fall inside one; with misses they fall elsewhere too
HIT_RATES = [1.0, 0.6]
SEEDS = range(3)
DRAFTERS = {"look-up": lambda model: None, "causal-LM": lambda model: model, "DFlash": tiny_dflash_drafter}


class PutRecorder(BaseStreamer):
    """Keeps what was put, and that it ended."""

    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


class StopAfterToken(StoppingCriteria):
    """Ends after the `count`-th occurrence of a token in what it was shown, one sequence at a time."""

    def __init__(self, token_id: int, count: int = 1):
        self.token_id, self.count, self.calls = token_id, count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids[0].tolist())
        self.count -= int(input_ids[0, -1]) == self.token_id
        return torch.full((input_ids.shape[0],), self.count <= 0)


class StopAtLength(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.fixture(scope="module")
def models():
    """By family, enabled."""
    return {family: hf_ddtree.enable(tiny_model(family)) for family in ["llama", *WINDOWED]}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


@pytest.fixture(scope="module")
def free_run(llama):
    """`[1, PROMPT_LENGTH + NEW_TOKENS + 4]`: what the model generates if nothing stops it.

    A little longer than any request, so that a drafter that knows it drafts past every stop.
    """
    return generate(llama, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS + 4)


def new_tokens(sequence) -> list[int]:
    return sequence[0, PROMPT_LENGTH:].tolist()


def first_time(tokens: list[int]) -> list[int]:
    """The tokens that do not occur before, in order: each, as EOS, ends the text at another place."""
    return list(dict.fromkeys(tokens))


def position_of_the_stop(tree_output) -> str:
    """Where in its round the last token fell."""
    if not tree_output.rounds:
        return "prefill"
    last = tree_output.rounds[-1]
    on_a_node = last.tree.child(last.path[-1], int(tree_output.sequences[0, -1])) is not None
    if not on_a_node:
        return "bonus token"
    return "first node" if last.accepted_length == 0 else "inside a path"


def assert_same_end(model, free_run, settings, make_criteria=lambda: None) -> list[str]:
    """Tree and plain agree in tokens, streamed puts and cache, for many trees; returns where the stops fell."""
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


def assert_same_cache(cache, expected):
    """As many rows in every layer, with the same keys and values."""
    assert cache.get_seq_length() == expected.get_seq_length()
    assert len(cache.layers) == len(expected.layers)
    for layer, expected_layer in zip(cache.layers, expected.layers):
        assert type(layer) is type(expected_layer)
        assert layer.get_seq_length() == expected_layer.get_seq_length()
        for states, expected_states in [(layer.keys, expected_layer.keys), (layer.values, expected_layer.values)]:
            # rounding is relative to the largest entries that went into the sums; a wrong row differs by their size
            tolerance = 1e-5 * float(expected_states.abs().max())
            torch.testing.assert_close(states, expected_states, rtol=0, atol=tolerance)


def test_eos_at_every_place_of_the_text(llama, free_run):
    """Each distinct token as EOS: the stop falls on the prefill's token, on nodes, inside paths and on bonus tokens."""
    positions = Counter()
    tokens = first_time(new_tokens(free_run)[:NEW_TOKENS])
    for token in tokens:
        positions.update(assert_same_end(llama, free_run, {"eos_token_id": token}))
    assert set(positions) == {"prefill", "first node", "inside a path", "bonus token"}
    assert positions["inside a path"] > len(tokens)


@pytest.mark.parametrize("order", ["later-first", "earlier-first", "one-that-never-comes"])
def test_several_eos_tokens_end_at_the_first_that_comes(llama, free_run, order):
    early, late = first_time(new_tokens(free_run))[4], first_time(new_tokens(free_run))[9]
    never = next(token for token in range(4, 128) if token not in new_tokens(free_run))
    eos = {"later-first": [late, early], "earlier-first": [early, late], "one-that-never-comes": [never, late]}[order]
    assert_same_end(llama, free_run, {"eos_token_id": eos})


def test_an_eos_token_of_the_generation_config_ends_the_text(llama, free_run, monkeypatch):
    monkeypatch.setattr(llama.generation_config, "eos_token_id", first_time(new_tokens(free_run))[6])
    assert_same_end(llama, free_run, {})


@pytest.mark.parametrize("max_new_tokens", range(1, NEW_TOKENS + 1))
def test_max_new_tokens(llama, free_run, max_new_tokens):
    assert_same_end(llama, free_run, {"max_new_tokens": max_new_tokens})


@pytest.mark.parametrize("max_length", [PROMPT_LENGTH + 1, PROMPT_LENGTH + 2, PROMPT_LENGTH + 9])
def test_max_length(llama, free_run, max_length):
    assert_same_end(llama, free_run, {"max_length": max_length})


def test_no_drafter_overshoots_max_new_tokens(llama, free_run):
    """Also those that build their own trees."""
    drafters = [None, tiny_model("llama", seed=1), llama, tiny_dflash_drafter(llama)]
    for max_new_tokens in range(1, 8):
        for drafter in drafters:
            settings = {"max_new_tokens": max_new_tokens, "assistant_model": drafter, "tree_budget": 8}
            sequence = generate(llama, free_run[:, :PROMPT_LENGTH], **settings)
            assert sequence.tolist() == free_run[:, : PROMPT_LENGTH + max_new_tokens].tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_a_custom_criterion_on_tokens_is_asked_once_per_token(llama, free_run, count):
    """A stateful criterion: it would stop elsewhere if it were asked about rejected tokens, or twice."""
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
def test_a_custom_criterion_on_length(llama, free_run, length):
    assert_same_end(llama, free_run, {}, lambda: [StopAtLength(PROMPT_LENGTH + length)])


def test_several_criteria_end_at_the_first_that_holds(llama, free_run):
    tokens = first_time(new_tokens(free_run))
    for settings, length in [
        ({"eos_token_id": tokens[7], "max_new_tokens": 15}, 12),
        ({"eos_token_id": tokens[12], "max_new_tokens": 15}, 5),
        ({"eos_token_id": tokens[12], "max_new_tokens": 4}, 9),
    ]:
        criteria = [StopAfterToken(tokens[14]), StopAtLength(PROMPT_LENGTH + length)]
        assert_same_end(llama, free_run, settings, lambda: list(criteria))


@pytest.mark.parametrize("first", range(0, 12, 2))
@pytest.mark.parametrize("n_characters", [1, 2, 4])
def test_stop_strings_of_several_tokens(llama, free_run, first, n_characters):
    """The string ends at a token of a path; its beginning may lie in an earlier round."""
    tokenizer = char_tokenizer()
    text = tokenizer.decode(new_tokens(free_run)[first : first + n_characters])
    assert_same_end(llama, free_run, {"stop_strings": [text, "never this"], "tokenizer": tokenizer})


def test_stop_strings_on_a_real_tokenizer(embedded):
    """Tokens of several characters: the string may end inside a token."""
    model, tokenizer = embedded
    inputs = tokenizer("Once upon a time, in a village by the sea, there", return_tensors="pt")
    free_run = generate(model, inputs.input_ids, max_new_tokens=24, do_sample=False)
    n_prompt = inputs.input_ids.shape[1]
    text = tokenizer.decode(free_run[0, n_prompt:])
    # cut words in the middle: the stop strings begin and end inside tokens
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
    """A clock that stands still until it is told to advance; stands in for the `time` module."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    def advance(self, *args):
        self.now += 1.0


@pytest.fixture
def one_second_per_forward(llama, monkeypatch):
    """Time as the model's forwards make it pass, so that nothing depends on how fast the machine is."""
    generate(llama, random_ids(2), max_new_tokens=2, tree_budget=1)  # the forwards of the model's check do not count
    clock = Clock()
    monkeypatch.setattr(transformers_criteria, "time", clock)
    handle = llama.register_forward_hook(clock.advance)
    yield clock
    handle.remove()


@pytest.mark.parametrize("max_time", [0.5, 1.5, 3.5])
def test_max_time_ends_within_the_round_that_crosses_it(llama, free_run, one_second_per_forward, max_time):
    start = one_second_per_forward.now
    drafter = scripted(free_run, hit_rate=1.0)
    settings = {"max_time": max_time, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    input_ids = free_run[:, :PROMPT_LENGTH]
    output = generate(llama, input_ids, assistant_model=drafter, tree_budget=TREE_BUDGET, **settings)
    assert one_second_per_forward.now - start == max_time + 0.5
    # the forward that crosses the limit still gives one token, as in plain generate, and no more
    assert len(new_tokens(output.sequences)) == 1 + sum(r.accepted_length + 1 for r in output.rounds)
    assert not output.rounds or output.rounds[-1].accepted_length == 0
    assert output.sequences.tolist() == free_run[:, : output.sequences.shape[1]].tolist()


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@pytest.mark.parametrize("cache_kind", ["own", "DynamicCache()"])
@pytest.mark.parametrize("ending", ["eos", "length"])
def test_a_chat_continues_from_the_returned_cache(models, family, cache_kind, ending):
    """Three turns with one cache, each given the full ids and mask, equal plain turns; the prompt passes the window."""
    model = models[family]
    turns = {}
    for kind in ["plain", "tree"]:
        ids = random_ids(WINDOW + 5)
        cache = None if cache_kind == "own" else DynamicCache()
        turns[kind] = []
        for turn in range(3):
            settings = {"max_new_tokens": 9, "attention_mask": torch.ones_like(ids), "cache": cache}
            if ending == "eos":
                settings["eos_token_id"] = free_token(model, ids)
            if kind == "tree":
                # knows more than will be generated, so that the stop falls inside a path
                script = generate(model, ids, max_new_tokens=14, attention_mask=torch.ones_like(ids))
                settings |= {"assistant_model": scripted(script, hit_rate=0.9, seed=turn), "tree_budget": TREE_BUDGET}
            output = generate(model, ids, return_dict_in_generate=True, **settings)
            cache = output.cache
            turns[kind].append(output)
            ids = torch.cat([output.sequences, random_ids(4, seed=10 + turn)], dim=1)
    for plain, tree in zip(turns["plain"], turns["tree"]):
        assert tree.sequences.tolist() == plain.sequences.tolist()
    assert_same_cache(turns["tree"][-1].cache, turns["plain"][-1].cache)
    # and the last turn is as without any cache
    n_new = len(tree.rounds) + sum(r.accepted_length for r in tree.rounds) + 1
    ids = tree.sequences[:, :-n_new]
    without_cache = generate(model, ids, max_new_tokens=n_new, attention_mask=torch.ones_like(ids))
    assert tree.sequences.tolist() == without_cache.tolist()


def free_token(model, ids) -> int:
    """A token that ends the turn in its middle."""
    sequence = generate(model, ids, max_new_tokens=6, attention_mask=torch.ones_like(ids))
    return int(sequence[0, -1])


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7, 18])
def test_the_returned_cache_of_a_windowed_model_has_plain_generates_rows(models, family, max_new_tokens):
    model, ids = models[family], random_ids(PROMPT_LENGTH)
    script = generate(model, ids, max_new_tokens=max_new_tokens + 4)
    assert_same_end(model, script, {"max_new_tokens": max_new_tokens})


@pytest.mark.parametrize("make_drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("second_turn", ["all-ids", "new-ids"])
def test_a_second_turn_with_every_drafter(llama, make_drafter, padding, second_turn):
    """With a cache, `generate` takes all ids or the new ones alone; the mask always covers everything, padding too."""
    turns = {}
    for kind in ["plain", "tree"]:
        tree = {"assistant_model": make_drafter(llama), "tree_budget": 8} if kind == "tree" else {}
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(PROMPT_LENGTH)], dim=1)
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        settings = {"max_new_tokens": 9, "return_dict_in_generate": True, **tree}
        first = generate(llama, ids, attention_mask=mask, **settings)
        # the last token of the first turn is not in the cache
        message = torch.cat([first.sequences[:, -1:], random_ids(3, seed=1)], dim=1)
        ids = torch.cat([first.sequences[:, :-1], message], dim=1)
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        given = ids if second_turn == "all-ids" else message
        turns[kind] = generate(llama, given, attention_mask=mask, cache=first.cache, **settings)
    assert turns["tree"].sequences.tolist() == turns["plain"].sequences.tolist()
    assert_same_cache(turns["tree"].cache, turns["plain"].cache)


class ImpatientStreamer(PutRecorder):
    """Gives up after some tokens, as a user who presses a key does."""

    def put(self, value):
        super().put(value)
        if len(self.puts) == 8:
            raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_interrupted_request_leaves_whole_rounds_in_the_cache(models, family, seed):
    """The text goes on from the cache as if nothing had happened, though a path was half walked."""
    model, ids = models[family], random_ids(WINDOW + 5)
    script = generate(model, ids, max_new_tokens=NEW_TOKENS)
    cache = DynamicCache(config=model.config)
    drafter = scripted(script, hit_rate=1.0, seed=seed)
    with pytest.raises(KeyboardInterrupt):
        settings = {"assistant_model": drafter, "tree_budget": TREE_BUDGET, "streamer": ImpatientStreamer()}
        generate(model, ids, max_new_tokens=NEW_TOKENS, cache=cache, **settings)
    rows = cache.get_seq_length()
    assert ids.shape[1] <= rows < ids.shape[1] + 7
    so_far = script[:, : rows + 1]
    settings = {"attention_mask": torch.ones_like(so_far), "max_new_tokens": script.shape[1] - rows - 1}
    assert generate(model, so_far, cache=cache, **settings).tolist() == script.tolist()


def test_no_node_lies_past_the_last_position_of_a_model_with_learned_positions():
    """EOS comes before the positions end, so plain generate never needs the ones a deep tree would ask for."""
    n_positions = PROMPT_LENGTH + NEW_TOKENS
    model = hf_ddtree.enable(tiny_model("gpt2", max_position_embeddings=n_positions))
    free_run = generate(model, random_ids(PROMPT_LENGTH), max_new_tokens=NEW_TOKENS)
    # the last token that did not occur before
    eos = first_time(new_tokens(free_run))[-1]
    longer = torch.cat([free_run, random_ids(20)], dim=1)
    assert_same_end(model, longer, {"eos_token_id": eos, "max_new_tokens": 2 * NEW_TOKENS})
