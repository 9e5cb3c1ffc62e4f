"""What each drafter drafts, against its definition computed from scratch, round by round."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.drafters import (
    AssistantTreeGenerator,
    DFlashTreeGenerator,
    DraftSampling,
    PromptLookupTreeGenerator,
    TreeCandidateGenerator,
)
from hf_ddtree.drafters.dflash import embed_without_norm
from hf_ddtree.drafters.prompt_lookup import longest_suffix_matches
from hf_ddtree.testing import (
    VOCAB_SIZE,
    WINDOW,
    ScriptedDrafter,
    tiny_dflash_drafter,
    tiny_model,
    tiny_muse_glimmer_drafter,
    truncated_copy,
)
from hf_ddtree.tree import POLICIES

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def prompt(length=WINDOW + 8):
    return torch.randint(4, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))


def sampling(**settings) -> DraftSampling:
    return DraftSampling(GenerationConfig(**settings), POLICIES["target"])


def prefixes(tree):
    """The drafted tokens from the root's child down to each node."""
    paths = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return paths


def target_of(family: str):
    """A target; at the last of its positions rounds without a tree lie between the others."""
    if family == "llama beyond its positions":
        return tiny_model("llama", max_position_embeddings=34)
    return tiny_model(family)


def spy_on(monkeypatch, cls, name, record):
    """Call `record(self, args, result)` after each call of a method."""
    original = getattr(cls, name)

    def wrapper(self, *args):
        result = original(self, *args)
        record(self, args, result)
        return result

    monkeypatch.setattr(cls, name, wrapper)


# --- DFlash ---------------------------------------------------------------------------------------------------------


def draft_from_scratch(drafter, target, sequence: torch.Tensor) -> torch.Tensor:
    """The block after `sequence`, `[block_size - 1, V]`, without any cache: one target and one drafter forward.

    Tapped states of all tokens but the last, which is the root and fills slot 0; masks fill the other slots.
    """
    config = drafter.config
    context = sequence[:, :-1]
    states = target(input_ids=context, output_hidden_states=True).hidden_states
    context_states = torch.cat([states[layer + 1] for layer in config.target_layer_ids], dim=-1)
    block = torch.tensor([[int(sequence[0, -1])] + [config.mask_token_id] * (config.block_size - 1)])
    embeds = embed_without_norm(target.get_input_embeddings(), block)
    positions = torch.arange(context.shape[1] + config.block_size)[None]
    hidden = drafter(noise_embeds=embeds, context_hidden_states=context_states, position_ids=positions)
    return target.get_output_embeddings()(hidden.last_hidden_state)[0, 1:]


@pytest.mark.parametrize("kind", ["z-lab", "Muse Glimmer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "muse_glimmer", "llama beyond its positions"])
@torch.no_grad()
def test_dflash_drafts_from_the_accepted_path_in_every_round(kind, family, monkeypatch):
    target = hf_ddtree.enable(target_of(family))
    drafter = tiny_dflash_drafter(target) if kind == "z-lab" else tiny_muse_glimmer_drafter(target)
    if kind == "Muse Glimmer":  # a window makes drafting from scratch differ in what the cache has dropped
        drafter.config.layer_types = ["full_attention"] * 2
    drafts, sequences = [], []
    spy_on(monkeypatch, DFlashTreeGenerator, "draft", lambda self, args, logits: drafts.append(logits))
    spy_on(monkeypatch, DFlashTreeGenerator, "get_candidates", lambda self, args, tree: sequences.append(args[0]))
    target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=40)
    assert len(drafts) > 6
    for logits, sequence in zip(drafts, sequences, strict=True):
        torch.testing.assert_close(logits, draft_from_scratch(drafter, target, sequence), **TOLERANCE)


@torch.no_grad()
def test_the_z_lab_model_equals_transformers_own_implementation():
    """The same architecture under other names; the weights are moved over."""
    target = tiny_model("llama")
    ours, theirs = tiny_dflash_drafter(target), tiny_muse_glimmer_drafter(target)
    theirs.config.layer_types = ["full_attention"] * 2
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): value for name, value in ours.state_dict().items()})
    sequence = prompt()
    drafted = draft_from_scratch(ours, target, sequence)
    torch.testing.assert_close(drafted, draft_from_scratch(theirs, target, sequence), **TOLERANCE)


@torch.no_grad()
def test_the_window_of_a_dflash_drafter_is_kept():
    target = tiny_model("llama")
    windowed = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    full, sliding = tiny_dflash_drafter(target), tiny_dflash_drafter(target, **windowed)
    # the window is counted over what the drafter caches, so both are run as in generation
    for drafter, reaches in ((full, True), (sliding, False)):
        drafts = []
        for first in (5, 6):
            sequence = prompt()
            generator = DFlashTreeGenerator(drafter, target, sampling())
            states = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
            states[:, 0] = first
            generator.prefill(states, torch.arange(20)[None])
            drafts.append(generator.draft(int(sequence[0, -1])))
        assert torch.equal(*drafts) != reaches


def test_temperature_shapes_the_dflash_tree():
    """A hot request spreads the budget over siblings, a cold one spends it on depth."""
    target = tiny_model("llama")
    drafter = tiny_dflash_drafter(target)
    depths = []
    for temperature in (0.01, 100.0):
        generator = DFlashTreeGenerator(drafter, target, sampling(do_sample=True, temperature=temperature))
        generator.prefill(torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)), torch.arange(3)[None])
        depths.append(int(generator.get_candidates(prompt(), 8, 10).depths.max()))
    assert depths == [4, 1]


# --- causal LM ------------------------------------------------------------------------------------------------------


def best_prefixes(drafter, sequence, tree_budget, max_depth):
    """The most probable continuations under the drafter itself, by expanding every prefix that could be among them."""
    best, level = [], [((), 0.0)]
    for _ in range(max_depth):
        tokens = torch.tensor([sequence[0].tolist() + list(prefix) for prefix, _ in level])
        log_probs = drafter(input_ids=tokens).logits[:, -1].log_softmax(-1)
        children = [
            ((*prefix, token), score + float(log_probs[i, token]))
            for i, (prefix, score) in enumerate(level)
            for token in range(VOCAB_SIZE)
        ]
        level = sorted(children, key=lambda child: -child[1])[:tree_budget]
        best = sorted(best + level, key=lambda child: -child[1])[:tree_budget]
    return {prefix for prefix, _ in best}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2", "llama beyond its positions"])
@torch.no_grad()
def test_causal_lm_drafts_its_most_probable_prefixes_in_every_round(family, monkeypatch):
    target = hf_ddtree.enable(target_of(family))
    drafter = truncated_copy(target, 3) if family != "gpt2" else target
    drafter.generation_config.assistant_confidence_threshold = 0.0
    drafter.generation_config.num_assistant_tokens = 3
    rounds = []
    spy_on(monkeypatch, AssistantTreeGenerator, "get_candidates", lambda self, args, tree: rounds.append((args, tree)))
    target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=10)
    assert len(rounds) > 4
    for (sequence, tree_budget, max_depth), tree in rounds:
        assert set(prefixes(tree)[1:]) == best_prefixes(drafter, sequence, tree_budget, min(3, max_depth))


def test_a_doubtful_causal_lm_stops_early():
    target = tiny_model("llama")
    sizes = []
    for threshold in (0.0, 1.1):
        target.generation_config.assistant_confidence_threshold = threshold
        generator = AssistantTreeGenerator(target, sampling())
        sizes.append(int(generator.get_candidates(prompt(), 8, 10).depths.max()))
    assert sizes[0] > 1 and sizes[1] == 1


# --- prompt look-up -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6))
def test_longest_suffix_matches(tokens, longest):
    """Against trying all suffix lengths, longest first."""
    n = len(tokens)
    expected = []
    for size in range(min(longest, n - 1), 0, -1):
        suffix = tokens[n - size :]
        expected = [end for end in range(size - 1, n - 1) if tokens[end - size + 1 : end + 1] == suffix]
        if expected:
            break
    assert longest_suffix_matches(np.array(tokens), longest).tolist() == expected


def look_up(tokens, tree_budget, **settings):
    generator = PromptLookupTreeGenerator(GenerationConfig(**settings))
    return prefixes(generator.get_candidates(torch.tensor([tokens]), tree_budget, 100))[1:]


def test_continuations_share_their_prefix_and_the_most_recent_comes_first():
    tokens = [1, 2, 7, 8, 1, 2, 7, 9, 1, 2]
    assert look_up(tokens, 100, prompt_lookup_num_tokens=2) == [(7,), (7, 9), (7, 8)]
    assert look_up(tokens, 2, prompt_lookup_num_tokens=2) == [(7,), (7, 9)]


def test_without_a_match_there_is_only_the_root():
    assert look_up([1, 2, 3], 8) == []
    assert look_up([1], 8) == []


# --- fit between drafter and target ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 16}, "hidden_size is 16, the target's 32"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}}, r"target_layer_ids \[4\] are outside"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1, 2]}}, r"target_layer_ids \[-1\] are outside"),
        ({"num_target_layers": 36}, "num_target_layers is 36, but the target has 4"),
        ({"vocab_size": 200}, "vocab_size is 200, the target's 128"),
        ({"dflash_config": {"mask_token_id": 128, "target_layer_ids": [0, 2]}}, "mask_token_id 128 is outside"),
    ],
)
def test_a_drafter_of_another_target_is_refused(fields, message):
    target = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match=f"assistant_model: .*{message}"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=tiny_dflash_drafter(target, **fields), tree_budget=4)


def test_an_incomplete_drafter_is_refused():
    target = hf_ddtree.enable(tiny_model("llama"))
    for fields, message in (
        ({"block_size": 1}, "block_size of at least 2"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks dflash_config.mask_token_id"),
    ):
        drafter = tiny_dflash_drafter(target, **fields)
        with pytest.raises(ValueError, match=f"assistant_model: .*{message}"):
            target.generate(prompt(), max_new_tokens=4, assistant_model=drafter, tree_budget=4)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_causal_lm_with_broken_weights_is_refused(do_sample):
    target = hf_ddtree.enable(tiny_model("llama"))
    drafter = truncated_copy(target, 2)
    drafter.lm_head.weight = torch.nn.Parameter(torch.full_like(drafter.lm_head.weight, torch.nan))
    with pytest.raises(ValueError, match="assistant_model: its logits contain NaN"):
        target.generate(prompt(), max_new_tokens=4, do_sample=do_sample, assistant_model=drafter, tree_budget=4)


def test_a_drafter_in_training_mode_is_refused():
    target = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match="assistant_model: the drafter is in training mode"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=truncated_copy(target, 2).train(), tree_budget=4)


class WrongRoot(TreeCandidateGenerator):
    def get_candidates(self, input_ids, tree_budget, max_depth):
        return DraftTree.from_lists([(int(input_ids[0, -1]) + 1) % VOCAB_SIZE, 8], [-1, 0])


def test_a_generator_of_the_users_own_is_checked():
    target = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match="assistant_model: get_candidates must return a DraftTree whose root"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=WrongRoot(), tree_budget=4)
    script = target.generate(prompt(), max_new_tokens=4, do_sample=False)[0].tolist()
    generator = ScriptedDrafter(script)
    target.generate(prompt(), max_new_tokens=4, assistant_model=generator, tree_budget=4)
    with pytest.raises(ValueError, match="assistant_model: a candidate generator serves one generate call"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=generator, tree_budget=4)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"parents": [-1, 0]}, "different lengths"),
        ({"depths": [0, 1, 2, 3]}, "different lengths"),
        ({"log_reach": [0.0, -1.0]}, "different lengths"),
        ({"parents": [0, 0, 1]}, "parent"),
        ({"parents": [-1, 2, 0], "depths": [0, 2, 1]}, "precedes"),
        ({"parents": [-1, 1, 0]}, "precedes"),
        ({"parents": [-1, 0, -1]}, "precedes"),
        ({"depths": [0, 1, 1]}, "depths"),
        ({"depths": [1, 2, 3]}, "depths"),
        ({"log_reach": [0.0, -1.0, -0.5]}, "log_reach"),
        ({"log_reach": [0.0, float("nan"), -1.0]}, "log_reach"),
        ({"log_reach": [-1.0, -1.0, -1.0]}, "log_reach"),
    ],
)
def test_trees_of_the_users_own_are_checked(fields, problem):
    class Broken(TreeCandidateGenerator):
        def get_candidates(self, input_ids, tree_budget, max_depth):
            tree = DraftTree.from_lists([int(input_ids[0, -1]), 8, 9], [-1, 0, 1], log_reach=[0.0, -1.0, -2.0])
            return replace(tree, **{name: torch.tensor(values) for name, values in fields.items()})

    target = hf_ddtree.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match=f"assistant_model: .*no tree: .*{problem}"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=Broken(), tree_budget=4)


def test_threads_that_share_a_model_do_not_disturb_each_other():
    target = hf_ddtree.enable(tiny_model("llama"))
    drafter = tiny_dflash_drafter(target)
    prompts = [prompt(length) for length in (10, 17, 24, 31)]
    plain = [target.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]

    def run(ids):
        return target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter, tree_budget=8)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(run, prompts), plain))
