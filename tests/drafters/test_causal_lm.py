"""What a causal LM drafts, against its most probable prefixes found by expanding every candidate."""

import copy

import pytest
import torch
from helpers import generate, prefixes, random_ids, spy_on, target_of

import hf_ddtree
from hf_ddtree import POLICIES
from hf_ddtree.drafters.causal_lm import CausalLMDrafter
from hf_ddtree.drafters.q import DraftSampling
from hf_ddtree.testing import VOCAB_SIZE, WINDOW, tiny_model, truncated_copy

PROMPT = random_ids(WINDOW + 8, seed=1)


def best_prefixes(model, sequence, tree_budget: int, max_depth: int) -> set[tuple[int, ...]]:
    """Return the most probable continuations under the model, by expanding every prefix that could be among them."""
    best, level = [], [((), 0.0)]
    for _ in range(max_depth):
        tokens = torch.tensor([sequence[0].tolist() + list(prefix) for prefix, _ in level])
        log_probs = model(input_ids=tokens).logits[:, -1].log_softmax(-1)
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
def test_draft_holds_the_most_probable_prefixes_in_every_round(family, monkeypatch):
    target = hf_ddtree.enable(target_of(family))
    model = truncated_copy(target, 3) if family != "gpt2" else target
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = 3
    rounds = []
    spy_on(monkeypatch, CausalLMDrafter, "draft", lambda self, args, tree: rounds.append((args, tree)))
    generate(target, PROMPT, max_new_tokens=24, do_sample=False, assistant_model=model, tree_budget=10)
    assert len(rounds) > 4
    for (sequence, tree_budget, max_depth), tree in rounds:
        assert set(prefixes(tree)) == best_prefixes(model, sequence, tree_budget, min(3, max_depth))


def test_draft_ends_early_below_the_confidence_threshold():
    model = tiny_model("llama")
    depths = []
    for threshold in (0.0, 1.1):
        model.generation_config.assistant_confidence_threshold = threshold
        drafter = CausalLMDrafter(model, DraftSampling(POLICIES["target"]))
        depths.append(int(drafter.draft(PROMPT, 8, 10).depths.max()))
    assert depths[0] > 1 and depths[1] == 1


def test_draft_takes_at_most_num_assistant_tokens_levels():
    model = tiny_model("llama")
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = 2
    drafter = CausalLMDrafter(model, DraftSampling(POLICIES["target"]))
    assert int(drafter.draft(PROMPT, 30, 10).depths.max()) == 2


@torch.no_grad()
def test_commit_keeps_the_evaluated_part_of_the_path_and_drops_the_rest():
    model = tiny_model("llama")
    model.generation_config.assistant_confidence_threshold = 0.0
    drafter = CausalLMDrafter(model, DraftSampling(POLICIES["target"]))
    tree = drafter.draft(PROMPT, 8, 10)
    path = tree.path_to(int(tree.depths.argmax()))
    drafter.commit(path, torch.zeros(1, len(path), 0))
    assert drafter.cache.get_seq_length() == drafter.committed < PROMPT.shape[1] + len(path)
    tokens = torch.cat([PROMPT, tree.token_ids[path[1:]][None], random_ids(1, seed=2)], dim=1)
    fresh = CausalLMDrafter(model, DraftSampling(POLICIES["target"]))
    assert prefixes(drafter.draft(tokens, 8, 10)) == prefixes(fresh.draft(tokens, 8, 10))


def padded(model, vocab_size: int):
    """Return a copy of a model with another number of rows in its embedding and its head."""
    model = copy.deepcopy(model)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


SETTINGS = [
    {"do_sample": False},
    *({"do_sample": True, "top_k": 50, "top_p": 0.99, "tree_sampling": name} for name in POLICIES),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.get("tree_sampling", "greedy"))
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 40, VOCAB_SIZE + 40], ids=["smaller", "larger"])
def test_draft_of_another_padding_fits_the_target(monkeypatch, settings, vocab_size):
    """The target emits tokens that the smaller drafter does not have, and the larger one prefers ones beyond it."""
    target = tiny_model("llama")
    model = padded(truncated_copy(target, 3), vocab_size)
    if vocab_size > VOCAB_SIZE:
        model.lm_head.weight.data[VOCAB_SIZE:] = 3 * model.lm_head.weight.data[4:44]
    plain_settings = {name: value for name, value in settings.items() if name != "tree_sampling"}
    plain = generate(target, PROMPT, max_new_tokens=30, **plain_settings)
    trees = []
    spy_on(monkeypatch, CausalLMDrafter, "draft", lambda self, args, tree: trees.append(tree))
    options = {"assistant_model": model, "tree_budget": 12, "max_new_tokens": 30, **settings}
    output = generate(hf_ddtree.enable(target), PROMPT, return_dict_in_generate=True, **options)
    if settings.get("tree_sampling", "target") == "target":  # the other policies draw another text
        assert output.sequences.tolist() == plain.tolist()
        assert (plain[0, len(PROMPT[0]) :] >= VOCAB_SIZE - 40).any() and output.tokens_per_round > 1
    drafted = torch.cat([tree.token_ids[1:] for tree in trees])
    assert len(drafted) and drafted.max() < min(vocab_size, VOCAB_SIZE)
    proposals = [proposal for tree in trees for proposal in tree.proposals.values()]
    assert bool(proposals) == (settings.get("tree_sampling", "target") != "target")
    for proposal in proposals:
        assert len(proposal.q) == VOCAB_SIZE and not proposal.q[vocab_size:].any()
        torch.testing.assert_close(proposal.q.sum(), torch.tensor(1.0))


@torch.no_grad()
def test_draft_reads_token_0_for_a_token_that_it_does_not_have():
    model = padded(tiny_model("llama"), VOCAB_SIZE - 40)
    sampling = DraftSampling(POLICIES["target"])
    unknown = torch.cat([PROMPT[:, :-2] % 80, torch.tensor([[VOCAB_SIZE - 1, 5]])], dim=1)
    known = unknown.where(unknown < VOCAB_SIZE - 40, 0)
    drafts = [
        CausalLMDrafter(model, sampling, vocab_size=VOCAB_SIZE).draft(sequence, 8, 4) for sequence in (unknown, known)
    ]
    assert prefixes(drafts[0]) == prefixes(drafts[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_with_broken_weights_is_refused(monkeypatch, do_sample, value):
    target = hf_ddtree.enable(tiny_model("llama"))
    model = truncated_copy(target, 2)
    monkeypatch.setattr(
        model.lm_head, "forward", lambda states: states.new_full((*states.shape[:2], VOCAB_SIZE), value)
    )
    options = {"max_new_tokens": 4, "do_sample": do_sample, "assistant_model": model, "tree_budget": 4}
    with pytest.raises(ValueError, match="assistant_model: its logits contain NaN"):
        target.generate(PROMPT, **options)
