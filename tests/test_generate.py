"""The decoding loop: one target forward a round, streaming, and the cache that it leaves behind."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from helpers import assert_same_cache, char_tokenizer, generate, random_ids, scripted, tree_arguments
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_ddtree
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model

PROMPT_LENGTH = 12
NEW_TOKENS = 16
TREE_BUDGET = 24
WINDOWED = ["mistral", "gemma3_text", "gpt_oss"]
DRAFTERS = {"look-up": lambda model: None, "causal-LM": lambda model: model, "DFlash": tiny_dflash_drafter}


@pytest.fixture(scope="module")
def models():
    """Return enabled models by family."""
    return {family: hf_ddtree.enable(tiny_model(family)) for family in ["llama", *WINDOWED]}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


def test_generate_runs_the_target_once_a_round(llama):
    """Counted on the model, because a second forward would be slow without being wrong."""
    input_ids = random_ids(PROMPT_LENGTH)
    script = generate(llama, input_ids, max_new_tokens=NEW_TOKENS)
    forwards = []
    handle = llama.register_forward_hook(lambda module, args, outputs: forwards.append(outputs.logits.shape[1]))
    generate(llama, input_ids, max_new_tokens=2, tree_budget=2)  # runs the self-check, whose forwards do not count
    forwards.clear()
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    output = generate(llama, input_ids, **settings, **tree_arguments("scripted", llama, script))
    handle.remove()
    assert forwards == [1] + [r.tree_size + 1 for r in output.rounds]
    assert output.tokens_per_round > 1.5


def test_generate_prints_the_same_through_a_text_streamer(llama, capsys):
    tokenizer, input_ids = char_tokenizer(), random_ids(PROMPT_LENGTH)
    script = generate(llama, input_ids, max_new_tokens=NEW_TOKENS)
    printed = []
    for arguments in [{}, tree_arguments("scripted", llama, script)]:
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        generate(llama, input_ids, max_new_tokens=NEW_TOKENS, streamer=streamer, **arguments)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > NEW_TOKENS


def test_generate_yields_the_same_pieces_through_a_text_iterator_streamer(llama):
    tokenizer, input_ids = char_tokenizer(), random_ids(PROMPT_LENGTH)
    script = generate(llama, input_ids, max_new_tokens=NEW_TOKENS)
    pieces = []
    for arguments in [{}, tree_arguments("scripted", llama, script)]:
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        settings = {"max_new_tokens": NEW_TOKENS, "streamer": streamer, **arguments}
        thread = Thread(target=generate, args=(llama, input_ids), kwargs=settings)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1] and len("".join(pieces[0])) > NEW_TOKENS


def test_generate_in_threads_that_share_a_model_gives_each_its_own_text(llama):
    drafter = tiny_dflash_drafter(llama)
    settings = {"max_new_tokens": 12, "do_sample": False}
    prompts = [random_ids(length, seed=1) for length in (10, 17, 24, 31)]
    plain = [llama.generate(ids, **settings) for ids in prompts]

    def run(ids):
        return llama.generate(ids, assistant_model=drafter, tree_budget=8, **settings)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(run, prompts), plain))


def all_ones(ids: torch.Tensor) -> dict:
    return {"attention_mask": torch.ones_like(ids)}


def token_in_the_middle(model, ids) -> int:
    """Return a token that, as EOS, ends the turn in its middle."""
    return int(generate(model, ids, max_new_tokens=6, **all_ones(ids))[0, -1])


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@pytest.mark.parametrize("cache_kind", ["own", "DynamicCache()"])
@pytest.mark.parametrize("ending", ["eos", "length"])
def test_generate_continues_a_chat_from_the_returned_cache(models, family, cache_kind, ending):
    """Three turns with one cache, each given all ids and the whole mask, equal plain turns. They exceed the window."""
    model = models[family]
    turns = {}
    for kind in ["plain", "tree"]:
        ids = random_ids(WINDOW + 5)
        cache = None if cache_kind == "own" else DynamicCache()
        turns[kind] = []
        for turn in range(3):
            settings = {"max_new_tokens": 9, "cache": cache, **all_ones(ids)}
            if ending == "eos":
                settings["eos_token_id"] = token_in_the_middle(model, ids)
            if kind == "tree":
                # the script is longer than the turn, so that the stop falls inside a path
                script = generate(model, ids, max_new_tokens=14, **all_ones(ids))
                settings |= {"assistant_model": scripted(script, hit_rate=0.9, seed=turn), "tree_budget": TREE_BUDGET}
            output = generate(model, ids, return_dict_in_generate=True, **settings)
            cache = output.cache
            turns[kind].append(output)
            ids = torch.cat([output.sequences, random_ids(4, seed=10 + turn)], dim=1)
    for plain, tree in zip(turns["plain"], turns["tree"], strict=True):
        assert tree.sequences.tolist() == plain.sequences.tolist()
    last = turns["tree"][-1]
    assert_same_cache(last.cache, turns["plain"][-1].cache)
    # and the last turn is what the model generates without any cache
    n_new = len(last.rounds) + sum(r.accepted_length for r in last.rounds) + 1
    ids = last.sequences[:, :-n_new]
    without_cache = generate(model, ids, max_new_tokens=n_new, **all_ones(ids))
    assert last.sequences.tolist() == without_cache.tolist()


@pytest.mark.parametrize("make_drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("second_turn", ["all-ids", "new-ids"])
def test_generate_takes_a_second_turn_with_every_drafter(llama, make_drafter, padding, second_turn):
    """With a cache, `generate` takes all ids or only the new ones. The mask always covers everything."""
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


class ImpatientStreamer(BaseStreamer):
    """Interrupts after 8 values, as a user does who presses a key."""

    def __init__(self):
        self.n_values = 0

    def put(self, value):
        self.n_values += 1
        if self.n_values == 8:
            raise KeyboardInterrupt

    def end(self):
        raise AssertionError("the request was interrupted")


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("seed", range(3))
def test_generate_that_is_interrupted_leaves_whole_rounds_in_the_cache(models, family, seed):
    """The text can be continued from the cache, although the interruption came in the middle of a path."""
    model, ids = models[family], random_ids(WINDOW + 5)
    script = generate(model, ids, max_new_tokens=20)
    cache = DynamicCache(config=model.config)
    drafter = scripted(script, hit_rate=1.0, seed=seed)
    settings = {"assistant_model": drafter, "tree_budget": TREE_BUDGET, "streamer": ImpatientStreamer()}
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, max_new_tokens=20, cache=cache, **settings)
    rows = cache.get_seq_length()
    assert ids.shape[1] <= rows < ids.shape[1] + 7
    so_far = script[:, : rows + 1]
    settings = {"max_new_tokens": script.shape[1] - rows - 1, **all_ones(so_far)}
    assert generate(model, so_far, cache=cache, **settings).tolist() == script.tolist()
