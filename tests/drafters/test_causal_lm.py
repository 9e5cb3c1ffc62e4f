"""What a causal LM drafts, against its most probable prefixes found by expanding every candidate."""

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


@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_with_broken_weights_is_refused(do_sample):
    target = hf_ddtree.enable(tiny_model("llama"))
    model = truncated_copy(target, 2)
    model.lm_head.weight = torch.nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
    options = {"max_new_tokens": 4, "do_sample": do_sample, "assistant_model": model, "tree_budget": 4}
    with pytest.raises(ValueError, match="assistant_model: its logits contain NaN"):
        target.generate(PROMPT, **options)
