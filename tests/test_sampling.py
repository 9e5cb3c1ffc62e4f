"""Every sampling policy has exactly the target's distribution: enumerated over all random choices, and measured."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_ddtree
from examples.sampling import check_distribution
from hf_ddtree.budget import CostAwareBudget, Experience
from hf_ddtree.cost import VerifyCost
from hf_ddtree.drafters.assistant import _DrawnGrowth
from hf_ddtree.randomness import Randomness
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, truncated_copy
from hf_ddtree.tree import POLICIES, DraftTree, Proposal, build_tree
from hf_ddtree.walk import choose_with_proposal, k_sequential, recursive_rejection, solve_gamma, walk_tree

DRAWING = ["hybrid", "swor", "spectr"]


class Scripted(Randomness):
    """Follows a script of choices, then always takes the first possible one; remembers what could have been chosen."""

    def __init__(self, script: list[int]):
        super().__init__()
        self.script, self.trace = script, []

    def choose(self, probabilities: list[float]) -> int:
        options = [i for i, probability in enumerate(probabilities) if probability > 0]
        position = len(self.trace)
        chosen = self.script[position] if position < len(self.script) else options[0]
        self.trace.append((chosen, options, probabilities[chosen]))
        return chosen

    def flip(self, probability):
        probability = min(1.0, probability)
        return self.choose([1 - probability, probability]) == 1

    def draw(self, weights):
        return self.choose((weights.double() / weights.double().sum()).tolist())

    def draw_outside(self, weights, requests, distinct):
        results = []
        for excluded, n in requests:
            left = weights.double().clone()
            left[excluded] = 0
            taken = []
            for _ in range(n):
                taken.append(self.draw(left))
                if distinct:
                    left[taken[-1]] = 0
            results.append(taken)
        return results


def outcomes(function):
    """The exact distribution of `function(randomness)`, by running it under every sequence of choices."""
    result, scripts = {}, [[]]
    while scripts:
        script = scripts.pop()
        randomness = Scripted(script)
        outcome = function(randomness)
        probability = math.prod(p for _, _, p in randomness.trace)
        result[outcome] = result.get(outcome, 0.0) + probability
        choices = [chosen for chosen, _, _ in randomness.trace]
        for i in range(len(script), len(choices)):
            scripts += [[*choices[:i], other] for other in randomness.trace[i][1] if other != choices[i]]
    return result


class Sequence:
    """Stands in for the emitter: p is a table over prefixes."""

    def __init__(self, p: dict, length: int, randomness: Randomness):
        self.p, self.length, self.randomness, self.tokens = p, length, randomness, ()

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.length

    def emit(self, _, proposal=None, plain_draw=True) -> int:
        p = self.p[self.tokens]
        token = choose_with_proposal(p, proposal, self.randomness)[0] if proposal else self.randomness.draw(p)
        self.tokens += (token,)
        return token


def generate(p, length, make_tree, randomness) -> tuple[int, ...]:
    """Rounds of drafting and walking until `length` tokens are out."""
    sequence = Sequence(p, length, randomness)
    while not sequence.finished:
        tree = make_tree(sequence.tokens, length - len(sequence.tokens), randomness)
        walk_tree(tree, torch.zeros(1, len(tree), 1), sequence)
    return sequence.tokens


def table(vocab_size, length, kind, seed) -> dict:
    """p for every prefix, fp64."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for n in range(length):
        for prefix in itertools.product(range(vocab_size), repeat=n):
            logits = 2 * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            if kind == "banned":
                logits[torch.randint(vocab_size, (), generator=generator)] = -torch.inf
            if kind == "one-hot":
                logits = 1e9 * torch.nn.functional.one_hot(logits.argmax(), vocab_size).double()
            result[prefix] = logits.softmax(-1)
    return result


def marginals(vocab_size, depth, kind, seed) -> torch.Tensor:
    """Draft logits."""
    logits = 2 * torch.randn(depth, vocab_size, generator=torch.Generator().manual_seed(1000 + seed))
    if kind == "zeros":
        logits[:, 0] = -torch.inf
    if kind == "one-hot":
        logits = logits.masked_fill(logits < logits.max(-1, keepdim=True).values, -torch.inf)
    return logits


def exact(p: dict, length: int) -> dict:
    """The target's own distribution over sequences."""
    vocab_size = len(p[()])
    return {
        tokens: math.prod(float(p[tokens[:i]][token]) for i, token in enumerate(tokens))
        for tokens in itertools.product(range(vocab_size), repeat=length)
    }


def largest_difference(distribution: dict, expected: dict) -> float:
    return max(abs(distribution.get(tokens, 0.0) - probability) for tokens, probability in expected.items())


def dflash_trees(draft_logits, tree_budget, policy):
    def make_tree(prefix, room, randomness):
        acceptance = [0.8] * len(draft_logits)  # high, so that small trees too have drawn children
        return build_tree(draft_logits[: room - 1], tree_budget, 0, policy, acceptance, randomness)

    return make_tree


# vocabulary, length, budget: up to depth 3, small enough to run through all choices
SIZES = [(3, 3, 3), (4, 3, 2), (5, 2, 4), (6, 2, 3), (3, 4, 2)]
SPECTR_SIZES = [(3, 3, 2), (4, 2, 3), (6, 2, 2), (3, 4, 2)]  # draws with replacement have the most outcomes


@pytest.mark.parametrize("q_kind", ["full", "zeros", "one-hot"])
@pytest.mark.parametrize("p_kind", ["full", "banned", "one-hot"])
@pytest.mark.parametrize("policy", POLICIES)
def test_trees_over_marginals_are_exact(policy, p_kind, q_kind):
    drew = False
    for seed, (vocab_size, length, tree_budget) in enumerate(SPECTR_SIZES if policy == "spectr" else SIZES):
        p = table(vocab_size, length, p_kind, seed)
        make_tree = dflash_trees(marginals(vocab_size, length - 1, q_kind, seed), tree_budget, POLICIES[policy])
        distribution = outcomes(lambda randomness: generate(p, length, make_tree, randomness))
        assert largest_difference(distribution, exact(p, length)) < 1e-12
        drew |= bool(make_tree((), length, Scripted([])).proposals)
    if policy != "target" and q_kind != "one-hot":
        assert drew, "the cases must have drawn children"


@pytest.mark.parametrize("policy", POLICIES)
def test_trees_cut_to_what_is_worth_its_cost_are_exact(policy):
    sizes = set()
    cost = VerifyCost([1, 2, 4], [1, 2], [[1.0, 1.1, 1.8], [1.0, 1.1, 1.8]])
    for seed in range(2):
        p, draft_logits = table(3, 3, "full", seed), marginals(3, 2, "full", seed)

        def make_tree(*args, draft_logits=draft_logits):
            grown = dflash_trees(draft_logits, 3, POLICIES[policy])(*args)
            tree = CostAwareBudget(cost, 1, Experience()).trim(grown, 0.1)
            sizes.add((len(grown), len(tree)))
            return tree

        distribution = outcomes(lambda randomness: generate(p, 3, make_tree, randomness))  # noqa: B023
        assert largest_difference(distribution, exact(p, 3)) < 1e-12
    assert any(cut < grown for grown, cut in sizes) and any(cut > 1 for _, cut in sizes)


class FixedSampling:
    """What a growth needs of `DraftSampling`."""

    def __init__(self, policy, randomness):
        self.policy, self.randomness = policy, randomness

    def acceptance(self, depth):
        return 0.8


@pytest.mark.parametrize("policy", DRAWING)
def test_trees_grown_level_by_level_are_exact(policy):
    for seed, (vocab_size, length, tree_budget) in enumerate([(3, 3, 4), (4, 3, 3), (5, 2, 4)]):
        p, q = table(vocab_size, length, "full", seed), table(vocab_size, length, "full", seed + 50)

        def make_tree(prefix, room, randomness, q=q, tree_budget=tree_budget):
            growth = _DrawnGrowth(0, tree_budget, FixedSampling(POLICIES[policy], randomness))
            paths, level = {0: prefix}, [0]
            for _ in range(room - 1):
                growth.expand(level, torch.stack([q[paths[node]] for node in level]).log())
                for node in growth.newest:
                    paths[node] = (*paths[growth.parents[node]], growth.token_ids[node])
                level = growth.newest
                if not level:
                    break
            return growth.finish()[0]

        distribution = outcomes(lambda randomness: generate(p, length, make_tree, randomness))
        assert largest_difference(distribution, exact(p, length)) < 1e-12


def test_the_enumeration_catches_leviathan_on_deterministic_children():
    """min(1, p / q) is for a child drawn from q; on the most probable token it emits p = .2 at q = .5 with 40%."""
    p = {(): torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)}
    q = torch.tensor([0.5, 0.3, 0.2])

    def wrong(randomness):
        return (recursive_rejection(p[()], q.double(), [0], randomness),)

    distribution = outcomes(wrong)
    assert distribution[(0,)] == pytest.approx(0.4)
    assert largest_difference(distribution, exact(p, 1)) > 0.1


def test_the_enumeration_catches_a_shape_that_reacts_to_drawn_tokens():
    """Dropping drawn children that are improbable under q, as a budget spent after drawing would."""
    p, draft_logits = table(4, 2, "full", 0), marginals(4, 1, "full", 2)
    honest = dflash_trees(draft_logits, 2, POLICIES["hybrid"])

    def reacting(prefix, room, randomness):
        tree = honest(prefix, room, randomness)
        kept = {
            node: proposal
            for node, proposal in tree.proposals.items()
            if all(proposal.outside(p[()])[token] > 0.3 for token in proposal.tokens)
        }
        return DraftTree(tree.token_ids, tree.parents, tree.depths, kept)

    expected = exact(p, 2)
    assert largest_difference(outcomes(lambda r: generate(p, 2, honest, r)), expected) < 1e-12
    assert largest_difference(outcomes(lambda r: generate(p, 2, reacting, r)), expected) > 1e-3


# --- the rules ------------------------------------------------------------------------------------------------------


def distributions(seed, vocab_size=6):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 2).softmax(-1)
    return p, q


@pytest.mark.parametrize("seed", range(5))
def test_one_draw_is_accepted_as_often_as_any_coupling_allows(seed):
    """p(S) + sum over v outside S of min(p(v), q'(v))."""
    p, q = distributions(seed)
    inside = [int(q.argmax())]
    outside = Proposal([], q, inside, 1, False).outside(p)

    def accepted(randomness):
        drawn = randomness.draw_outside(q, [(inside, 1)], distinct=True)[0]
        return recursive_rejection(p, outside, drawn, randomness) in drawn + inside

    off_children = torch.ones(6, dtype=torch.bool)
    off_children[inside] = False
    expected = float(p[inside].sum() + torch.minimum(p, outside)[off_children].sum())
    assert outcomes(accepted)[True] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_sequential_accepts_gamma_beta(k):
    p, q = distributions(7)
    gamma = solve_gamma(p, q, k)
    beta = float(torch.minimum(q, p / gamma).sum())

    def accepted(randomness):
        drawn = randomness.draw_outside(q, [([], k)], distinct=False)[0]
        return k_sequential(p, q, drawn, randomness) in drawn

    # the bisection stops a little above the root, where one may also draw an accepted token from the residual
    assert outcomes(accepted)[True] == pytest.approx(gamma * beta, abs=2e-2)
    assert 1 - (1 - beta) ** k <= gamma * beta + 1e-12


def test_banned_tokens_are_never_emitted():
    p = torch.tensor([0.0, 0.6, 0.4, 0.0])
    q = torch.tensor([0.7, 0.1, 0.1, 0.1])
    for policy, tokens in (("swor", [0, 3]), ("spectr", [0, 0]), ("hybrid", [0])):
        proposal = Proposal(tokens, q, [], 1, POLICIES[policy].replacement)
        assert set(outcomes(lambda r, x=proposal: choose_with_proposal(p, x, r)[0])) <= {1, 2}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 4), excluded=st.sets(st.integers(0, 4), max_size=2))
def test_draws_without_replacement_are_distinct_and_outside(seed, n, excluded):
    weights = torch.rand(8, generator=torch.Generator().manual_seed(seed)) ** 8  # some carry almost everything
    for tokens in Randomness(seed).draw_outside(weights, [(sorted(excluded), n)] * 3, distinct=True):
        assert len(set(tokens)) == n and not set(tokens) & excluded


def test_draws_without_replacement_have_their_distribution():
    """Chi-squared over the 6 ordered pairs outside the excluded token, 5 degrees of freedom: 99.9% below 20.5."""
    weights = torch.tensor([0.5, 0.3, 0.1, 0.1])
    randomness, counts, n = Randomness(0), {}, 6000
    for _ in range(n // 20):
        for pair in randomness.draw_outside(weights, [([0], 2)] * 20, distinct=True):
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    left = {1: 0.6, 2: 0.2, 3: 0.2}
    expected = {(a, b): n * left[a] * left[b] / (1 - left[a]) for a in left for b in left if a != b}
    assert sum((counts.get(pair, 0) - e) ** 2 / e for pair, e in expected.items()) < 20.5


def test_a_draw_has_its_distribution():
    """Chi-squared over 3 tokens, 2 degrees of freedom: 99.9% below 13.8."""
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    randomness, n = Randomness(0), 6000
    tokens = [randomness.draw(weights) for _ in range(n)]
    assert set(tokens) == {1, 3, 4}
    assert sum((tokens.count(i) - e) ** 2 / e for i, e in {1: n / 2, 3: n / 4, 4: n / 4}.items()) < 13.8


def test_a_draw_that_rounding_put_outside_the_weights_is_not_taken(monkeypatch):
    monkeypatch.setattr(Randomness, "_many", lambda self, weights, n: [0, 2][:n])
    assert Randomness(0).draw(torch.tensor([0.0, 0.5, 0.5])) == 2


def test_the_tail_of_a_large_vocabulary_is_drawn():
    """100,000 tokens of 1e-8 each behind one of almost all: an fp32 cumulative sum would never give one of them."""
    weights = torch.full((100_001,), 1e-8)
    weights[0] = 1 - 1e-3
    randomness = Randomness(0)
    tokens = randomness.draw_outside(weights, [([], 40_000)], distinct=False)[0]
    assert 10 < sum(token > 0 for token in tokens) < 80  # 40 expected
    tokens = [randomness.draw(weights) for _ in range(8_000)]
    assert sum(token > 0 for token in tokens) < 30  # 8 expected, and 0 once in 3,000 times
    assert any(token > 0 for token in tokens)


# --- through generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_through_generate_have_the_target_distribution(policy):
    """5,000 samples of three tokens under top-k, top-p and a repetition penalty. `examples/sampling.py` takes more."""
    report = check_distribution(policy, n_samples=5000, seed=0)
    print(report)
    assert report["total_variation"] < report["band"]
    assert report["p_value"] > 1e-3
    assert (report["tried"] > 0.5) == (policy != "target"), "with nothing drawn this would show nothing"


def sample(model, drafter, policy, prompt, seed, **settings):
    torch.manual_seed(seed)
    defaults = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "tree_budget": 10, "return_dict_in_generate": True}
    return model.generate(prompt, assistant_model=drafter, tree_sampling=policy, **{**defaults, **settings})


@pytest.mark.parametrize("temperature", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["causal LM", "DFlash"])
def test_peaked_distributions_leave_nothing_to_draw_and_work(kind, policy, temperature):
    """Probabilities underflow where their logarithms do not."""
    model = hf_ddtree.enable(tiny_model("llama"))
    for seed in range(3):
        drafter = truncated_copy(model, 2) if kind == "causal LM" else tiny_dflash_drafter(model, seed=seed)
        settings = {"temperature": temperature, "max_new_tokens": 10, "tree_budget": 64}
        output = sample(model, drafter, policy, torch.tensor([[5, 6, 7, 8]]), seed, **settings)
        assert output.sequences.shape[1] == 14


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["causal LM", "DFlash"])
def test_a_seed_fixes_the_output_and_drawn_children_are_accepted(kind, policy):
    model = hf_ddtree.enable(tiny_model("llama"))
    drafter = model if kind == "causal LM" else tiny_dflash_drafter(model)
    prompt = torch.tensor([[5, 6, 7]])
    first = sample(model, drafter, policy, prompt, seed=1)
    assert torch.equal(first.sequences, sample(model, drafter, policy, prompt, seed=1).sequences)
    assert not torch.equal(first.sequences, sample(model, drafter, policy, prompt, seed=2).sequences)
    if kind == "causal LM" and policy != "target":  # q is p: every first draw is accepted
        target = sample(model, drafter, "target", prompt, seed=1)
        assert first.tokens_per_round > target.tokens_per_round + 0.5
