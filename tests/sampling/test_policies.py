"""Every sampling policy has exactly the target's distribution: enumerated over all random choices, and measured."""

import runpy

import pytest
import torch
from helpers import ROOT, generate
from sampling.enumeration import (
    ScriptedChoices,
    exact_distribution,
    generate_text,
    largest_difference,
    outcomes,
    random_marginals,
    target_table,
    trees_over_marginals,
)

import hf_ddtree
from hf_ddtree.budget.budget import CostAwareBudget
from hf_ddtree.budget.cost import VerifyCost
from hf_ddtree.budget.history import History
from hf_ddtree.drafters.growth import DrawnGrowth
from hf_ddtree.sampling.policies import MAX_DRAWN, POLICIES
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, truncated_copy
from hf_ddtree.tree import DraftTree

DRAWING = ["hybrid", "swor", "spectr"]
# vocabulary, length, budget: up to depth 3, small enough to run through all choices
SIZES = [(3, 3, 3), (4, 3, 2), (5, 2, 4), (6, 2, 3), (3, 4, 2)]
SPECTR_SIZES = [(3, 3, 2), (4, 2, 3), (6, 2, 2), (3, 4, 2)]  # draws with replacement have the most outcomes


def test_policies_say_which_children_a_node_may_get():
    kinds = {name: (policy.deterministic, policy.drawn, policy.replacement) for name, policy in POLICIES.items()}
    assert kinds == {
        "target": (True, 0, False),
        "hybrid": (True, 1, False),
        "swor": (False, MAX_DRAWN, False),
        "spectr": (False, MAX_DRAWN, True),
    }


@pytest.mark.parametrize("q_kind", ["full", "zeros", "one-hot"])
@pytest.mark.parametrize("p_kind", ["full", "banned", "one-hot"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_exact_on_trees_over_marginals(policy, p_kind, q_kind):
    drew = False
    for seed, (vocab_size, length, tree_budget) in enumerate(SPECTR_SIZES if policy == "spectr" else SIZES):
        p = target_table(vocab_size, length, p_kind, seed)
        draft_logits = random_marginals(vocab_size, length - 1, q_kind, seed)
        make_tree = trees_over_marginals(draft_logits, tree_budget, POLICIES[policy])

        def text(randomness, p=p, length=length, make_tree=make_tree):
            return generate_text(p, length, make_tree, randomness)

        assert largest_difference(outcomes(text), exact_distribution(p, length)) < 1e-12
        drew |= bool(make_tree((), length, ScriptedChoices([])).proposals)
    if policy != "target" and q_kind != "one-hot":
        assert drew, "the cases must have drawn children"


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_exact_on_trees_cut_to_what_is_worth_its_cost(policy):
    sizes = set()
    cost = VerifyCost([1, 2, 4], [1, 2], [[1.0, 1.1, 1.8], [1.0, 1.1, 1.8]])
    for seed in range(2):
        p, draft_logits = target_table(3, 3, "full", seed), random_marginals(3, 2, "full", seed)

        def make_tree(*args, draft_logits=draft_logits):
            grown = trees_over_marginals(draft_logits, 3, POLICIES[policy])(*args)
            budget = CostAwareBudget(cost, 1, History())
            budget.begin_round(max_depth=9)
            [tree] = budget.select_nodes([grown])
            sizes.add((len(grown), len(tree)))
            return tree

        def text(randomness, p=p, make_tree=make_tree):
            return generate_text(p, 3, make_tree, randomness)

        assert largest_difference(outcomes(text), exact_distribution(p, 3)) < 1e-12
    assert any(cut < grown for grown, cut in sizes) and any(cut > 1 for _, cut in sizes)


class FixedSampling:
    """What a growth needs of `DraftSampling`."""

    def __init__(self, policy, randomness):
        self.policy, self.randomness = policy, randomness

    def acceptance(self, depth):
        return 0.8


@pytest.mark.parametrize("policy", DRAWING)
def test_policies_are_exact_on_trees_grown_level_by_level(policy):
    for seed, (vocab_size, length, tree_budget) in enumerate([(3, 3, 4), (4, 3, 3), (5, 2, 4)]):
        p, q = target_table(vocab_size, length, "full", seed), target_table(vocab_size, length, "full", seed + 50)

        def make_tree(prefix, room, randomness, q=q, tree_budget=tree_budget):
            growth = DrawnGrowth(0, tree_budget, FixedSampling(POLICIES[policy], randomness))
            paths, level = {0: prefix}, [0]
            for _ in range(room - 1):
                growth.expand(level, torch.stack([q[paths[node]] for node in level]).log())
                for node in growth.newest:
                    paths[node] = (*paths[growth.parents[node]], growth.token_ids[node])
                level = growth.newest
                if not level:
                    break
            return growth.finish()[0]

        def text(randomness, p=p, length=length, make_tree=make_tree):
            return generate_text(p, length, make_tree, randomness)

        assert largest_difference(outcomes(text), exact_distribution(p, length)) < 1e-12


def test_enumeration_catches_a_shape_that_reacts_to_drawn_tokens():
    """A budget spent after drawing would drop drawn children that are improbable under q."""
    p, draft_logits = target_table(4, 2, "full", 0), random_marginals(4, 1, "full", 2)
    honest = trees_over_marginals(draft_logits, 2, POLICIES["hybrid"])

    def reacting(prefix, room, randomness):
        tree = honest(prefix, room, randomness)
        kept = {
            node: proposal
            for node, proposal in tree.proposals.items()
            if all(proposal.outside(p[()])[token] > 0.3 for token in proposal.tokens)
        }
        return DraftTree(tree.token_ids, tree.parents, tree.depths, kept)

    expected = exact_distribution(p, 2)
    assert largest_difference(outcomes(lambda r: generate_text(p, 2, honest, r)), expected) < 1e-12
    assert largest_difference(outcomes(lambda r: generate_text(p, 2, reacting, r)), expected) > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_samples_from_the_target_distribution(policy):
    """5,000 samples of three tokens under top-k, top-p and a repetition penalty. The script by itself takes more."""
    check_distribution = runpy.run_path(str(ROOT / "examples" / "measure" / "sampling.py"))["check_distribution"]
    report = check_distribution(policy, n_samples=5000, seed=0)
    assert report["total_variation"] < report["band"], report
    assert report["p_value"] > 1e-3, report
    assert (report["tried"] > 0.5) == (policy != "target"), "with nothing drawn this would show nothing"


def sample(model, drafter, policy, prompt, seed, **settings):
    defaults = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "tree_budget": 10, "return_dict_in_generate": True}
    options = {**defaults, **settings, "assistant_model": drafter, "tree_sampling": policy}
    return generate(model, prompt, seed=seed, **options)


@pytest.mark.parametrize("temperature", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["causal LM", "DFlash"])
def test_generate_works_where_a_peaked_distribution_leaves_nothing_to_draw(kind, policy, temperature):
    """Probabilities underflow where their logarithms do not."""
    model = hf_ddtree.enable(tiny_model("llama"))
    for seed in range(3):
        drafter = truncated_copy(model, 2) if kind == "causal LM" else tiny_dflash_drafter(model, seed=seed)
        settings = {"temperature": temperature, "max_new_tokens": 10, "tree_budget": 64}
        output = sample(model, drafter, policy, torch.tensor([[5, 6, 7, 8]]), seed, **settings)
        assert output.sequences.shape[1] == 14


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["causal LM", "DFlash"])
def test_generate_repeats_its_output_for_a_seed_and_accepts_drawn_children(kind, policy):
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter = model if kind == "causal LM" else tiny_dflash_drafter(model)
    prompt = torch.tensor([[5, 6, 7]])
    first = sample(model, drafter, policy, prompt, seed=1)
    assert torch.equal(first.sequences, sample(model, drafter, policy, prompt, seed=1).sequences)
    assert not torch.equal(first.sequences, sample(model, drafter, policy, prompt, seed=2).sequences)
    if kind == "causal LM" and policy != "target":  # q is p, so every first draw is accepted
        target = sample(model, drafter, "target", prompt, seed=1)
        assert first.tokens_per_round > target.tokens_per_round + 0.5
