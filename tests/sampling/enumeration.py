"""The exact distribution of a random function, and texts that are drafted and walked token by token."""

import itertools
import math
from collections.abc import Callable

import torch

from hf_ddtree.build import build_tree
from hf_ddtree.sampling.policies import Policy
from hf_ddtree.sampling.randomness import Randomness
from hf_ddtree.sampling.rejection import choose_with_proposal
from hf_ddtree.tree import DraftTree
from hf_ddtree.walk import walk_tree


class ScriptedChoices(Randomness):
    """Follows a script of choices, and then always takes the first possible one. Keeps what could have been chosen."""

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


def outcomes(function: Callable) -> dict:
    """Return the exact distribution of `function(randomness)`, by running it under every sequence of choices."""
    result, scripts = {}, [[]]
    while scripts:
        script = scripts.pop()
        randomness = ScriptedChoices(script)
        outcome = function(randomness)
        probability = math.prod(p for _, _, p in randomness.trace)
        result[outcome] = result.get(outcome, 0.0) + probability
        choices = [chosen for chosen, _, _ in randomness.trace]
        for i in range(len(script), len(choices)):
            scripts += [[*choices[:i], other] for other in randomness.trace[i][1] if other != choices[i]]
    return result


class Sequence:
    """Stands in for the emitter. p is a table over prefixes."""

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


def generate_text(p: dict, length: int, make_tree: Callable, randomness: Randomness) -> tuple[int, ...]:
    """Draft and walk until there are `length` tokens.

    Args:
        p: the target's distribution after every prefix.
        length: the number of tokens.
        make_tree: gets the prefix, the number of tokens left, and the randomness.
        randomness: the source of all choices.
    """
    sequence = Sequence(p, length, randomness)
    while not sequence.finished:
        tree = make_tree(sequence.tokens, length - len(sequence.tokens), randomness)
        walk_tree(tree, torch.zeros(1, len(tree), 1), sequence)
    return sequence.tokens


def trees_over_marginals(draft_logits: torch.Tensor, tree_budget: int, policy: Policy) -> Callable[..., DraftTree]:
    """Return a `make_tree` that drafts as a DFlash drafter does."""

    def make_tree(prefix, room, randomness):
        acceptance = [0.8] * len(draft_logits)  # high, so that small trees have drawn children, too
        return build_tree(draft_logits[: room - 1], tree_budget, 0, policy, acceptance, randomness)

    return make_tree


def target_table(vocab_size: int, length: int, kind: str, seed: int) -> dict:
    """Return p, `[vocab_size]` fp64, for every prefix shorter than `length`."""
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


def random_marginals(vocab_size: int, depth: int, kind: str, seed: int) -> torch.Tensor:
    """Return draft logits, `[depth, vocab_size]`."""
    logits = 2 * torch.randn(depth, vocab_size, generator=torch.Generator().manual_seed(1000 + seed))
    if kind == "zeros":
        logits[:, 0] = -torch.inf
    if kind == "one-hot":
        logits = logits.masked_fill(logits < logits.max(-1, keepdim=True).values, -torch.inf)
    return logits


def exact_distribution(p: dict, length: int) -> dict:
    """Return the target's own distribution over sequences of `length` tokens."""
    vocab_size = len(p[()])
    return {
        tokens: math.prod(float(p[tokens[:i]][token]) for i, token in enumerate(tokens))
        for tokens in itertools.product(range(vocab_size), repeat=length)
    }


def largest_difference(distribution: dict, expected: dict) -> float:
    """Return the largest difference between two distributions at one outcome."""
    return max(abs(distribution.get(tokens, 0.0) - probability) for tokens, probability in expected.items())
