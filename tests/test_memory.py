"""What a returned output keeps in memory: no more than what plain `generate` returns, whatever was asked for."""

from collections.abc import Iterator

import pytest
import torch
from helpers import generate, random_ids, scripted, tree_arguments
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree.testing import FAMILIES, GATED_DELTA_FAMILIES, RECURRENT_FAMILIES, WINDOW, tiny_model

PROMPT = random_ids(WINDOW + 4, seed=1)  # longer than the window, so sliding layers drop rows
NEW_TOKENS = 10
SETTINGS = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
OUTPUTS = ["output_scores", "output_logits", "output_hidden_states"]


@pytest.fixture(scope="module")
def llama():
    return hf_ddtree.enable(tiny_model("llama"))


def tensors_in(found: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield every tensor that is reachable from an object."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
        return
    if isinstance(found, dict):
        parts = list(found.values())
    elif isinstance(found, list | tuple | set):
        parts = list(found)
    else:
        parts = list(getattr(found, "__dict__", {}).values())
    for part in parts:
        yield from tensors_in(part, seen)


def held(found: object) -> int:
    """Return the bytes of memory that an object keeps: each storage once, and in full even if only a part is seen."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(found, set()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def nbytes(found: object) -> int:
    """Return the bytes of the entries of all tensors that are reachable from an object."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(found, set())}.values())


def assert_holds_as_much(tree, plain) -> None:
    """Assert that each field keeps as much memory as in plain `generate`, except for the rounds.

    A cache may keep less: sliding layers of plain `generate` keep one more row in memory than they show.
    """
    assert set(tree) - {"rounds"} == set(plain)
    for name in set(plain) - {"cache"}:
        assert held(tree[name]) == held(plain[name]), name
    assert held(tree.cache) == nbytes(tree.cache) == nbytes(plain.cache) <= held(plain.cache)


@pytest.mark.parametrize("family", [*FAMILIES, *GATED_DELTA_FAMILIES, *RECURRENT_FAMILIES])
def test_output_holds_as_much_as_plain_generates_for_every_family(family):
    model = tiny_model(family)
    plain = generate(model, PROMPT, **SETTINGS, **dict.fromkeys(OUTPUTS, True))
    drafter = scripted(plain.sequences, hit_rate=0.8)
    settings = {**SETTINGS, **dict.fromkeys(OUTPUTS, True), "assistant_model": drafter, "tree_budget": 24}
    tree = generate(hf_ddtree.enable(model), PROMPT, **settings)
    assert tree.sequences.tolist() == plain.sequences.tolist() and tree.tokens_per_round > 1.5
    assert_holds_as_much(tree, plain)


@pytest.mark.parametrize("drafter", ["scripted", "dflash", "causal-lm", "look-up"])
@pytest.mark.parametrize("output", [None, *OUTPUTS])
def test_output_holds_as_much_as_plain_generates_with_every_drafter(output, drafter, llama):
    settings = {**SETTINGS, **({output: True} if output else {})}
    plain = generate(llama, PROMPT, **settings)
    tree = generate(llama, PROMPT, **settings, **tree_arguments(drafter, llama, plain.sequences))
    assert_holds_as_much(tree, plain)
    assert held(tree.rounds) == 0


@pytest.mark.parametrize("policy", ["target", "swor"])
def test_trace_holds_the_trees_alone(policy, llama):
    options = tree_arguments("dflash", llama, None) | {"tree_sampling": policy, "tree_trace": True}
    rounds = generate(llama, PROMPT, do_sample=True, **SETTINGS, **options).rounds
    per_node = 3 * 8 + 4  # token, parent and depth, and the estimate
    assert len(rounds) > 1 and held(rounds) == sum(per_node * len(r.tree) for r in rounds)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_cache_that_was_passed_in_holds_no_tree_after_an_interruption(family):
    model = hf_ddtree.enable(tiny_model(family))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    script = generate(model, PROMPT, max_new_tokens=NEW_TOKENS)

    def interrupt(input_ids, scores, **kwargs):
        if input_ids.shape[1] > PROMPT.shape[1] + 4:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    options = {"assistant_model": scripted(script, hit_rate=1.0), "tree_budget": 24, "stopping_criteria": [interrupt]}
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPT, max_new_tokens=NEW_TOKENS, cache=cache, **options)
    assert held(cache) == nbytes(cache)
