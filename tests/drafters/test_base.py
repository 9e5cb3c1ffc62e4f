"""The interface of drafters: what they inherit, and what the loop accepts from a drafter of the user's own."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_refused, generate, random_ids, scripted
from transformers.generation import CandidateGenerator

import hf_ddtree
from hf_ddtree import POLICIES, Drafter, DraftTree
from hf_ddtree.drafters.base import draft_tree
from hf_ddtree.drafters.q import DraftSampling
from hf_ddtree.testing import VOCAB_SIZE, tiny_model
from hf_ddtree.tree import Proposal

PROMPT = random_ids(24, seed=1)


@pytest.fixture(scope="module")
def target():
    return hf_ddtree.enable(tiny_model("llama"))


class Fixed(Drafter):
    """Drafts one tree that was made in advance."""

    def __init__(self, tree):
        self.tree = tree

    def draft(self, input_ids, tree_budget, max_depth):
        return self.tree


def test_draft_without_a_definition_names_the_method():
    class Undefined(Drafter):
        pass

    with pytest.raises(NotImplementedError, match=r"Undefined .*draft\(input_ids, tree_budget, max_depth\)"):
        Undefined().draft(PROMPT, 4, 4)


def test_get_candidates_refuses_and_names_tree_budget():
    drafter = Fixed(DraftTree.chain([5]))
    assert isinstance(drafter, CandidateGenerator)
    with pytest.raises(NotImplementedError, match=r"Fixed .*tree_budget"):
        drafter.get_candidates(PROMPT)
    with pytest.raises(NotImplementedError, match="tree_budget"):
        drafter.get_candidates(PROMPT, is_first_iteration=True)


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "enabled"])
def test_get_candidates_stops_assisted_generation_without_a_budget(enabled, monkeypatch):
    """In transformers' own assisted decoding, a drafter gives this error instead of a wrong text."""
    model = tiny_model("llama")
    drafter = scripted(generate(model, PROMPT, max_new_tokens=8))
    if enabled:
        hf_ddtree.enable(model)
    drafter.num_drafting_tokens = 0  # from transformers 5.25 on, the loop reads it before it asks for candidates
    # transformers builds its own candidate generator around a model, and takes nothing else
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: drafter)
    with pytest.raises(NotImplementedError, match=r"ScriptedDrafter .*tree_budget"):
        generate(model, PROMPT, max_new_tokens=8, prompt_lookup_num_tokens=3)


def test_drafter_without_a_budget_is_refused(target):
    drafter = Fixed(DraftTree.chain([5]))
    assert_refused("assistant_model: a Fixed .*tree_budget", target.generate, PROMPT, assistant_model=drafter)


def test_drafter_without_a_budget_is_refused_by_a_plain_model():
    """transformers reads the config of a model, which a drafter has only if it sets one itself."""
    drafter = Fixed(DraftTree.chain([5]))
    with pytest.raises(ValueError, match=r"assistant_model: a Fixed .*hf_ddtree\.enable\(model\).*tree_budget"):
        generate(tiny_model("llama"), PROMPT, max_new_tokens=8, assistant_model=drafter)
    assert not hasattr(drafter, "config")
    drafter.config = "its own"
    assert drafter.config == "its own"


def test_drafter_methods_that_need_no_definition_do_nothing():
    drafter = Fixed(DraftTree.chain([5]))
    assert drafter.taps == () and drafter.sampling is None and not drafter.used
    drafter.prefill(torch.zeros(1, 3, 0), torch.arange(3)[None])
    drafter.commit([0], torch.zeros(1, 1, 0))
    drafter.update_acceptance([(1, 0.5)])


def test_update_acceptance_passes_overlaps_to_the_sampling():
    drafter = Fixed(DraftTree.chain([5]))
    drafter.sampling = DraftSampling(POLICIES["hybrid"])
    before = drafter.sampling.acceptance(2)
    drafter.update_acceptance([(2, 1.0)])
    assert drafter.sampling.acceptance(2) > before


def test_draft_tree_returns_what_was_drafted():
    tree = DraftTree.from_lists([int(PROMPT[0, -1]), 8, 9], [-1, 0, 0])
    assert draft_tree(Fixed(tree), PROMPT, 4, 4, VOCAB_SIZE) is tree


def test_draft_tree_of_no_nodes_asks_no_drafter():
    tree = draft_tree(Fixed(None), PROMPT, 0, 4, VOCAB_SIZE)
    assert tree.token_ids.tolist() == [int(PROMPT[0, -1])] and tree.parents.tolist() == [-1]


NO_TREE = "assistant_model: .*draft returned no tree that can be verified: "


def test_draft_tree_of_another_root_is_refused(target):
    wrong = DraftTree.from_lists([(int(PROMPT[0, -1]) + 1) % VOCAB_SIZE, 8], [-1, 0])
    with pytest.raises(ValueError, match=f"{NO_TREE}its root is"):
        draft_tree(Fixed(wrong), PROMPT, 4, 4, VOCAB_SIZE)

    class WrongRoot(Drafter):
        def draft(self, input_ids, tree_budget, max_depth):
            return DraftTree.from_lists([(int(input_ids[0, -1]) + 1) % VOCAB_SIZE, 8], [-1, 0])

    with pytest.raises(ValueError, match=f"{NO_TREE}its root is"):
        generate(target, PROMPT, max_new_tokens=4, assistant_model=WrongRoot(), tree_budget=4)


@pytest.mark.parametrize("returned", [None, [5, 6], torch.tensor([[5, 6]])], ids=["None", "list", "tensor"])
def test_draft_tree_of_another_type_is_refused(returned):
    with pytest.raises(ValueError, match=f"{NO_TREE}a {type(returned).__name__} is not a DraftTree"):
        draft_tree(Fixed(returned), PROMPT, 4, 4, VOCAB_SIZE)


NOT_AN_ARRAY = "is not a 1-dimensional"
BROKEN_FIELDS = [
    ({"parents": [-1, 0]}, "different lengths"),
    ({"depths": [0, 1, 2, 3]}, "different lengths"),
    ({"log_reach": [0.0, -1.0]}, "different lengths"),
    ({"parents": [0, 0, 1]}, "parent"),
    ({"parents": [-1, 2, 0], "depths": [0, 2, 1]}, "precede"),
    ({"parents": [-1, 1, 0]}, "precede"),
    ({"parents": [-1, 0, -1]}, "precede"),
    ({"depths": [0, 1, 1]}, "depths"),
    ({"depths": [1, 2, 3]}, "depths"),
    ({"log_reach": [0.0, -1.0, -0.5]}, "log_reach"),
    ({"log_reach": [0.0, float("nan"), -1.0]}, "log_reach"),
    ({"log_reach": [-1.0, -1.0, -1.0]}, "log_reach"),
    (dict.fromkeys(("token_ids", "parents", "depths"), torch.zeros(0, dtype=torch.long)), "different lengths"),
    (
        {**dict.fromkeys(("token_ids", "parents", "depths"), torch.zeros(0, dtype=torch.long)), "log_reach": None},
        "empty",
    ),
    ({"token_ids": torch.tensor([5, 8, 9], dtype=torch.int32)}, f"token_ids {NOT_AN_ARRAY}"),
    ({"token_ids": torch.tensor([[5, 8, 9]])}, f"token_ids {NOT_AN_ARRAY}"),
    ({"token_ids": [5.0, 8.0, 9.0]}, f"token_ids {NOT_AN_ARRAY}"),
    ({"parents": torch.tensor([-1.0, 0.0, 1.0])}, f"parents {NOT_AN_ARRAY}"),
    ({"depths": torch.tensor([0, 1, 2], device="meta")}, f"depths {NOT_AN_ARRAY}"),
    ({"depths": (0, 1, 2)}, f"depths {NOT_AN_ARRAY}"),
    ({"log_reach": torch.tensor([[0.0, -1.0, -2.0]])}, f"log_reach {NOT_AN_ARRAY}"),
    ({"log_reach": torch.tensor([0.0, -1.0, -2.0], dtype=torch.bfloat16)}, f"log_reach {NOT_AN_ARRAY}"),
    ({"log_reach": torch.tensor([0, -1, -2])}, f"log_reach {NOT_AN_ARRAY}"),
]


@pytest.mark.parametrize("fields, problem", BROKEN_FIELDS)
def test_draft_tree_with_a_broken_field_is_refused(target, fields, problem):
    class Broken(Drafter):
        def draft(self, input_ids, tree_budget, max_depth):
            tree = DraftTree.from_lists([int(input_ids[0, -1]), 8, 9], [-1, 0, 1], log_reach=[0.0, -1.0, -2.0])
            values = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in fields.items()}
            return replace(tree, **values)

    with pytest.raises(ValueError, match=f"{NO_TREE}.*{problem}"):
        generate(target, PROMPT, max_new_tokens=4, assistant_model=Broken(), tree_budget=4)


def proposal(tokens: list[int], inside: list[int]) -> Proposal:
    return Proposal(tokens, torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE), inside, depth=1, replacement=False)


# the drafted tokens of a chain, its proposals, and what the error must name
MISFITS = {
    "token-beyond-the-vocabulary": ([8, VOCAB_SIZE], {}, f"token {VOCAB_SIZE} is outside .* {VOCAB_SIZE} tokens"),
    "negative-token": ([-1, 8], {}, "token -1 is outside"),
    "too-deep": ([8, 9, 8, 9, 8, 9, 8], {}, "a node lies at depth 7, and draft got max_depth=6"),
    "proposal-of-no-node": ([8], {2: proposal([8], [])}, "the proposal of node 2"),
    "proposal-of-no-token": ([8], {0: proposal([8, VOCAB_SIZE], [])}, "the proposal of node 0"),
    "proposal-inside-no-token": ([8], {0: proposal([8], [-1])}, "the proposal of node 0"),
}


@pytest.mark.parametrize("drafted, proposals, problem", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_tree_that_does_not_fit_the_target_is_refused(target, drafted, proposals, problem, do_sample):
    class Misfit(Drafter):
        def draft(self, input_ids, tree_budget, max_depth):
            return replace(DraftTree.chain([int(input_ids[0, -1]), *drafted]), proposals=proposals)

    options = {"assistant_model": Misfit(), "tree_budget": 4, "do_sample": do_sample}
    with pytest.raises(ValueError, match=f"{NO_TREE}{problem}"):
        generate(target, PROMPT, max_new_tokens=8, **options)


def test_draft_tree_of_the_greatest_depth_and_token_is_verified(target):
    class Fitting(Drafter):
        def draft(self, input_ids, tree_budget, max_depth):
            return DraftTree.chain([int(input_ids[0, -1]), *[VOCAB_SIZE - 1] * max_depth])

    plain = generate(target, PROMPT, max_new_tokens=8)
    assert (
        generate(target, PROMPT, max_new_tokens=8, assistant_model=Fitting(), tree_budget=4).tolist() == plain.tolist()
    )
