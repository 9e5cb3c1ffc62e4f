"""DFlash drafters in the layout of the speculators library: the same blocks as the same weights in the z-lab layout."""

import json

import pytest
import torch
from safetensors.torch import save_file
from test_drafters import prompt, spy_on

import hf_ddtree
from hf_ddtree.drafters import DFlashTreeGenerator
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model

WINDOW, BLOCK_SIZE = 8, 5
# a third of the vocabulary, in order, as the layout wants it
KEPT = torch.arange(1, VOCAB_SIZE, 3)


@pytest.fixture(scope="module")
def target():
    return hf_ddtree.enable(tiny_model("llama"))


def write(path, target, kept=None, layers=None, weights=None, **fields):
    """A checkpoint as the library saves it: only what differs from the defaults of the layers' config."""
    state = {**tiny_dflash_drafter(target).state_dict()}
    head = target.get_output_embeddings().weight.detach()
    state["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    state["lm_head.weight"] = (head if kept is None else head[kept]).clone()
    if kept is not None:
        state["d2t"] = kept - torch.arange(len(kept))
        state["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept, True)
    state.update(weights or {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/model", "architectures": []}},
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": VOCAB_SIZE if kept is None else len(kept),
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 3,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            **(layers or {}),
        },
        **fields,
    }
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    save_file({name: value.contiguous() for name, value in state.items() if value is not None}, path / "model.safetensors")
    return path


def drafts_of(monkeypatch, target, drafter) -> list[torch.Tensor]:
    """The logits of every block, and a check that the text is the target's own."""
    drafts = []
    with monkeypatch.context() as patch:
        spy_on(patch, DFlashTreeGenerator, "draft", lambda self, args, logits: drafts.append(logits))
        settings = {"max_new_tokens": 24, "do_sample": False}
        output = target.generate(prompt(), assistant_model=drafter, tree_budget=20, **settings)
    assert torch.equal(output, target.generate(prompt(), **settings))
    return drafts


def test_the_same_blocks_as_in_the_z_lab_layout(target, tmp_path, monkeypatch):
    drafter = hf_ddtree.load_drafter(write(tmp_path, target))
    expected = drafts_of(monkeypatch, target, tiny_dflash_drafter(target))
    drafts = drafts_of(monkeypatch, target, drafter)
    assert len(drafts) > 6
    for logits, wanted in zip(drafts, expected, strict=True):
        torch.testing.assert_close(logits, wanted)


def test_a_reduced_head_drafts_the_tokens_it_has(target, tmp_path):
    drafter = hf_ddtree.load_drafter(write(tmp_path, target, KEPT))
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits, full = drafter.logits(states), target.get_output_embeddings()(states)
    torch.testing.assert_close(logits[:, KEPT], full[:, KEPT])
    others = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, KEPT, False)
    assert (logits[:, others] == -torch.inf).all()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["target", "hybrid"])
def test_generates_with_a_reduced_head(target, tmp_path, settings, policy):
    drafter = hf_ddtree.load_drafter(write(tmp_path, target, KEPT))
    outputs = []
    for options in ({}, {"assistant_model": drafter, "tree_budget": 60, "tree_sampling": policy}):
        torch.manual_seed(0)
        outputs.append(target.generate(prompt(), max_new_tokens=24, **options, **settings))
    assert outputs[0].shape == outputs[1].shape
    if policy == "target" or not settings["do_sample"]:
        assert torch.equal(*outputs)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}


@pytest.mark.parametrize("non_causal", [False, True])
def test_sliding_layers_see_the_window_before_the_root_and_the_block(target, tmp_path, non_causal):
    path = write(tmp_path, target, layers=SLIDING, sliding_window_non_causal=non_causal)
    drafter = hf_ddtree.load_drafter(path)
    n_context = 20
    mask = drafter._sliding_mask(torch.zeros(1, BLOCK_SIZE, 32), n_context, cache=None)[0, 0] == 0
    for slot in range(BLOCK_SIZE):
        for key in range(n_context + BLOCK_SIZE):
            in_window = n_context - WINDOW <= key < n_context
            in_block = key >= n_context and (non_causal or key - n_context <= slot)
            assert bool(mask[slot, key]) == (in_window or in_block)


@pytest.mark.parametrize("non_causal", [False, True])
@torch.no_grad()
def test_sliding_layers_with_a_cache_draft_as_without(target, tmp_path, monkeypatch, non_causal):
    path = write(tmp_path, target, KEPT, layers=SLIDING, sliding_window_non_causal=non_causal)
    drafter = hf_ddtree.load_drafter(path)
    drafts, sequences = [], []
    spy_on(monkeypatch, DFlashTreeGenerator, "draft", lambda self, args, logits: drafts.append(logits))
    spy_on(monkeypatch, DFlashTreeGenerator, "get_candidates", lambda self, args, tree: sequences.append(args[0]))
    target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=drafter, tree_budget=20)
    for logits, sequence in zip(drafts, sequences, strict=True):
        context = sequence[:, :-1]
        states = target(input_ids=context, output_hidden_states=True).hidden_states
        block = torch.tensor([[int(sequence[0, -1])] + [3] * (BLOCK_SIZE - 1)])
        hidden = drafter(
            noise_embeds=drafter.embed_tokens(block),
            context_hidden_states=torch.cat([states[1], states[3]], dim=-1),
            position_ids=torch.arange(context.shape[1] + BLOCK_SIZE)[None],
        )
        torch.testing.assert_close(logits, drafter.logits(hidden.last_hidden_state)[0, 1:], rtol=2e-4, atol=2e-4)


def test_sampling_from_the_anchor_drafts_one_token_more(target, tmp_path, monkeypatch):
    drafter = hf_ddtree.load_drafter(write(tmp_path, target, sample_from_anchor=True))
    assert {len(logits) for logits in drafts_of(monkeypatch, target, drafter)[:-BLOCK_SIZE]} == {BLOCK_SIZE}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"speculators_model_type": "dspark"}, "type 'dspark' is no DFlash drafter"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"aux_hidden_state_layer_ids": None}, "target_layer_ids"),
        ({"weights": {"embed_tokens.weight": None}}, "missing keys .*embed_tokens"),
        ({"weights": {"d2t": None}}, "missing keys .*d2t"),
        ({"weights": {"markov.weight": torch.zeros(3)}}, "unexpected keys .*markov"),
        ({"weights": {"d2t": torch.full((len(KEPT),), VOCAB_SIZE)}}, "d2t does not map"),
        ({"weights": {"d2t": -torch.arange(len(KEPT))}}, "d2t does not map"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(target, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        hf_ddtree.load_drafter(write(tmp_path, target, KEPT, **change))


def test_layers_of_another_target_are_refused(target, tmp_path):
    drafter = hf_ddtree.load_drafter(write(tmp_path, target, aux_hidden_state_layer_ids=[1, 5]))
    with pytest.raises(ValueError, match="target_layer_ids"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=drafter, tree_budget=4)
