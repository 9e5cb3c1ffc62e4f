"""What a drafter keeps between turns: a turn with the cache of the last one drafts as with a full prefill."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import generate, random_ids, spy_on, write_speculators_drafter
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree.drafters import context
from hf_ddtree.drafters.causal_lm import CausalLMDrafter
from hf_ddtree.drafters.context import Context, take_context
from hf_ddtree.drafters.dflash import DFlashDrafter
from hf_ddtree.testing import WINDOW, tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter, truncated_copy

PADDING, N_NEW = 5, 9
PROMPT, MESSAGE, OTHER = random_ids(WINDOW + 4, seed=1), random_ids(6, seed=2), random_ids(30, seed=4)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over the layers of target and drafter
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}


def speculators_drafter(target, folder):
    return hf_ddtree.load_drafter(str(write_speculators_drafter(folder, target)))


# name -> the target's family, and a function of the target and a folder that makes the drafter
KINDS = {
    "DFlash": ("llama", lambda target, folder: tiny_dflash_drafter(target)),
    "causal LM": ("llama", lambda target, folder: truncated_copy(target, 3)),
    "DFlash, sliding": ("llama", lambda target, folder: tiny_dflash_drafter(target, **SLIDING)),
    "DFlash, sliding target": ("gemma3_text", lambda target, folder: tiny_dflash_drafter(target)),
    "DFlash, Gated DeltaNet": ("qwen3_5_text", lambda target, folder: tiny_dflash_drafter(target)),
    "DFlash, path by path": ("lfm2", lambda target, folder: tiny_dflash_drafter(target)),
    "speculators": ("llama", speculators_drafter),
    "Muse Glimmer": ("muse_glimmer", lambda target, folder: tiny_muse_glimmer_drafter(target)),
    "causal LM, sliding": ("gemma3_text", lambda target, folder: truncated_copy(target, 3)),
}
WAYS = ["all ids", "new ids", "padding", "chunks", "own positions"]
CASES = [(kind, way) for kind in KINDS for way in WAYS if way == "all ids" or kind in [*KINDS][:3]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes the target and the drafter of a kind, once each."""
    made: dict[str, tuple] = {}

    def make(kind: str):
        if kind not in made:
            family, make_drafter = KINDS[kind]
            target = hf_ddtree.enable(tiny_model(family))
            made[kind] = target, make_drafter(target, tmp_path_factory.mktemp("drafter"))
        return made[kind]

    return make


@pytest.fixture
def drafts(monkeypatch):
    """A list that collects what drafters compute: the logits of a DFlash block, or log-probabilities after the root."""
    found: list[torch.Tensor] = []
    spy_on(monkeypatch, DFlashDrafter, "draft_logits", lambda self, args, logits: found.append(logits))
    spy_on(monkeypatch, CausalLMDrafter, "_extend", lambda self, args, log_probs: found.append(log_probs))
    return found


def ask(target, drafter, ids, cache=None, **settings):
    """Decode a turn with a tree, or without one if the drafter is "plain"."""
    tree = {} if drafter == "plain" else {"assistant_model": drafter, "tree_budget": 10, "tree_trace": True}
    settings = {"max_new_tokens": N_NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return generate(target, ids, cache=cache, return_dict_in_generate=True, **tree, **settings)


def kept_for(drafter, cache) -> Context | None:
    """Return what is kept with a cache for a drafter."""
    return context._contexts.get(cache, {}).get(drafter)


def assert_drafts_as_with_a_full_prefill(target, drafter, ids, cache, drafts, n_given=None, **settings):
    """Compare text, draft logits and trees with those of a call without a cache. Return the output of both."""
    drafts.clear()
    full = ask(target, drafter, ids, **settings)
    expected = [*drafts]
    drafts.clear()
    given = ids if n_given is None else ids[:, -n_given:]
    output = ask(target, drafter, given, cache, **settings)
    assert output.sequences[:, given.shape[1] :].tolist() == full.sequences[:, ids.shape[1] :].tolist()
    assert len(drafts) == len(expected) > 1
    for logits, wanted in zip(drafts, expected, strict=True):
        torch.testing.assert_close(logits, wanted, **TOLERANCE)
    for entry, wanted_entry in zip(output.rounds, full.rounds, strict=True):
        assert entry.tree.token_ids.tolist() == wanted_entry.tree.token_ids.tolist()
        assert entry.tree.parents.tolist() == wanted_entry.tree.parents.tolist()
    return output, full


def assert_same_text(target, drafter, ids, cache, **settings):
    """Compare the text of a turn with that of plain `generate` without a cache, and return the output of the turn."""
    output = ask(target, drafter, ids, cache, **settings)
    assert output.sequences.tolist() == ask(target, "plain", ids, **settings).sequences.tolist()
    return output


@pytest.mark.parametrize("kind, way", CASES)
def test_take_context_lets_later_turns_draft_as_with_a_full_prefill(kind, way, models, drafts):
    target, drafter = models(kind)
    padding = PADDING if way == "padding" else 0
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), PROMPT], dim=1)
    cache = None
    for turn in range(3):
        # the last token of the turn before is not in its cache
        settings = {"n_given": MESSAGE.shape[1] + 1} if way == "new ids" and turn > 0 else {}
        settings["attention_mask"] = (torch.arange(ids.shape[1]) >= padding).long()[None]
        if way == "own positions":
            settings["position_ids"] = torch.arange(7, 7 + ids.shape[1])[None]
        if way == "chunks":
            settings["prefill_chunk_size"] = 4
        output, full = assert_drafts_as_with_a_full_prefill(target, drafter, ids, cache, drafts, **settings)
        cache, text = output.cache, full.sequences[:, padding:-1]
        found = kept_for(drafter, cache)
        assert found.text[0].tolist() == text[0].tolist()
        # a DFlash drafter has read everything. A causal LM still has to run the end of the last path.
        assert found.rows == list(range(len(found.rows)))
        assert len(found.rows) == text.shape[1] or ("causal" in kind and len(found.rows) > text.shape[1] - 6)
        ids = torch.cat([full.sequences, MESSAGE], dim=1)


@pytest.mark.parametrize("kind", ["DFlash", "causal LM", "DFlash, sliding"])
@pytest.mark.parametrize("n_left, end", [(0, OTHER), (5, OTHER), (20, MESSAGE)])
def test_take_context_after_the_user_cropped_the_cache(kind, n_left, end, models, drafts):
    """The conversation goes on differently, or another one begins. A window cannot go back, so its drafter restarts."""
    target, drafter = models(kind)
    output = ask(target, drafter, PROMPT)
    cache, ids = output.cache, torch.cat([output.sequences[:, :n_left], end], dim=1)
    cache.crop(n_left - cache.get_seq_length())
    if "sliding" in kind and n_left > 0:
        assert_same_text(target, drafter, ids, cache)
        assert kept_for(drafter, cache).rows == list(range(n_left, ids.shape[1] + N_NEW - 1))
    else:
        assert_drafts_as_with_a_full_prefill(target, drafter, ids, cache, drafts)


def test_take_context_after_the_user_reset_the_cache(models, drafts):
    target, drafter = models("DFlash")
    cache = ask(target, drafter, PROMPT).cache
    cache.reset()
    assert_drafts_as_with_a_full_prefill(target, drafter, OTHER, cache, drafts)


@pytest.mark.parametrize("n_cropped", [0, 7])
def test_take_context_after_others_extended_the_cache(n_cropped, models, drafts):
    """A causal LM runs what it has missed. For a DFlash drafter, the states of these tokens are lost."""
    for kind in ["causal LM", "DFlash"]:
        target, drafter = models(kind)
        first = ask(target, drafter, PROMPT)
        cache = first.cache
        n_shared = cache.get_seq_length() - n_cropped
        cache.crop(-n_cropped)
        # with 7 tokens cropped, the cache ends up with as many tokens as before, but with other ones
        middle = torch.cat([first.sequences[:, :n_shared], OTHER[:, :3]], dim=1)
        ids = ask(target, "plain", middle, cache, max_new_tokens=5).sequences
        n_cached = cache.get_seq_length()
        ids = torch.cat([ids, MESSAGE], dim=1)
        if kind == "causal LM":
            assert_drafts_as_with_a_full_prefill(target, drafter, ids, cache, drafts)
            continue
        assert_same_text(target, drafter, ids, cache)
        full = kept_for(drafter, ask(target, drafter, ids, full_cache := DynamicCache()).cache)
        assert full_cache.get_seq_length() == cache.get_seq_length()
        found = kept_for(drafter, cache)
        assert found.rows == [*range(n_shared), *range(n_cached, cache.get_seq_length())]
        # a row depends on its own state and position only, so the rows around the gap are those of a full prefill
        n_full = full.cache.get_seq_length()
        rows = [row for row in found.rows[: found.cache.get_seq_length()] if row < n_full]
        for layer, full_layer in zip(found.cache.layers, full.cache.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, : len(rows)], full_layer.keys[:, :, rows], **TOLERANCE)
            torch.testing.assert_close(layer.values[:, :, : len(rows)], full_layer.values[:, :, rows], **TOLERANCE)


def test_take_context_of_two_drafters_in_alternation(models, drafts):
    target, dflash = models("DFlash")
    causal = truncated_copy(target, 2)
    cache, ids = None, PROMPT
    for turn, drafter in enumerate([dflash, causal, dflash, causal]):
        if drafter is causal:
            output, _ = assert_drafts_as_with_a_full_prefill(target, drafter, ids, cache, drafts)
        else:
            output = assert_same_text(target, drafter, ids, cache)
        cache = output.cache
        assert len(context._contexts[cache]) == min(2, turn + 1)
        ids = torch.cat([output.sequences, MESSAGE], dim=1)
    n_turn = N_NEW + MESSAGE.shape[1]
    missing = range(PROMPT.shape[1] + N_NEW - 1, PROMPT.shape[1] + N_NEW - 1 + n_turn)
    found = kept_for(dflash, cache)
    assert found.rows == [row for row in range(found.rows[-1] + 1) if row not in missing]


def test_take_context_at_other_positions_starts_again(models):
    target, drafter = models("DFlash")
    first = ask(target, drafter, PROMPT)
    ids = torch.cat([first.sequences, MESSAGE], dim=1)
    n_cached = first.cache.get_seq_length()
    moved = {"position_ids": torch.arange(3, 3 + ids.shape[1])[None]}
    plain = ask(target, "plain", ids, copy.deepcopy(first.cache), **moved)
    output = ask(target, drafter, ids, first.cache, **moved)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert kept_for(drafter, output.cache).rows[0] == n_cached


@pytest.mark.parametrize("kind", ["DFlash", "causal LM"])
def test_take_context_of_a_converted_drafter_starts_again(kind, models):
    target, drafter = models(kind)
    drafter = copy.deepcopy(drafter)
    first = ask(target, drafter, PROMPT)
    drafter.to(torch.bfloat16)
    output = assert_same_text(target, drafter, torch.cat([first.sequences, MESSAGE], dim=1), first.cache)
    assert kept_for(drafter, output.cache).cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["DFlash", "causal LM"])
def test_take_context_after_an_interrupted_call_starts_again(kind, models):
    target, drafter = models(kind)
    first = ask(target, drafter, PROMPT)
    cache, ids = first.cache, torch.cat([first.sequences, MESSAGE], dim=1)
    calls = []

    def interrupt(input_ids, scores, **kwargs):
        calls.append(input_ids)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        ask(target, drafter, ids, cache, stopping_criteria=[interrupt])
    assert kept_for(drafter, cache) is None
    assert_same_text(target, drafter, calls[-1][:, : cache.get_seq_length() + 1], cache)


def test_take_context_gives_a_context_to_one_call_only(models):
    target, drafter = models("DFlash")
    output = ask(target, drafter, PROMPT)
    ids = torch.cat([output.sequences, MESSAGE], dim=1)
    inputs = {"cache": output.cache, "attention_mask": None, "position_ids": torch.arange(ids.shape[1])[None]}
    taken = [take_context(drafter, ids, inputs) for _ in range(2)]
    assert [len(entry.rows) for entry in taken] == [output.cache.get_seq_length(), 0]
    assert [entry.n_cached for entry in taken] == [output.cache.get_seq_length()] * 2


def test_take_context_lets_a_causal_lm_run_new_tokens_only(models):
    target, drafter = models("causal LM")
    first = ask(target, drafter, PROMPT)
    n_read = len(kept_for(drafter, first.cache).rows)
    ids = torch.cat([first.sequences, MESSAGE], dim=1)
    forwards = []
    hook = drafter.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ask(target, drafter, ids, first.cache)
    hook.remove()
    assert forwards[0] == ids.shape[1] + 1 - n_read <= MESSAGE.shape[1] + 6


@pytest.mark.parametrize("kind", ["DFlash", "causal LM"])
def test_keep_context_keeps_nothing_alive(kind):
    family, make_drafter = KINDS[kind]
    target = hf_ddtree.enable(tiny_model(family))
    drafters = [make_drafter(target, None) for _ in range(2)]
    caches = [ask(target, drafter, PROMPT).cache for drafter in drafters]
    gc.collect()  # caches of earlier tests
    n_caches = len(context._contexts)
    found = [weakref.ref(kept_for(*pair)) for pair in zip(drafters, caches, strict=True)]
    caches.pop()
    gc.collect()
    assert found[1]() is None and len(context._contexts) == n_caches - 1
    models = [weakref.ref(model) for model in (target, *drafters)]
    del target, drafters
    gc.collect()
    assert [reference() for reference in (*models, found[0])] == [None] * 4
    assert caches[0].get_seq_length() > 0 and not context._contexts[caches[0]]


def test_keep_context_leaves_the_cache_as_it_is(models):
    target, drafter = models("DFlash")
    outputs = [ask(target, drafter, PROMPT), ask(target, "plain", PROMPT)]
    assert vars(outputs[0].cache).keys() == vars(outputs[1].cache).keys()
    assert kept_for(drafter, copy.deepcopy(outputs[0].cache)) is None


def test_keep_context_keeps_nothing_without_a_model_or_without_tokens(models):
    target, drafter = models("DFlash")
    assert ask(target, None, PROMPT).cache not in context._contexts
    embeds = target.get_input_embeddings()(PROMPT).detach()
    output = target.generate(
        inputs_embeds=embeds, max_new_tokens=4, assistant_model=drafter, tree_budget=4, return_dict_in_generate=True
    )
    assert output.cache not in context._contexts
