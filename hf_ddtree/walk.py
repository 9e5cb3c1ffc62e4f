"""The walk down a verified tree, choosing every token as plain `generate` would."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .randomness import Randomness
from .tree import DraftTree, Proposal

GAMMA_STEPS = 10  # bisections; each halves what is left of the acceptance to be gained


@dataclass
class Emitter:
    """The sequence under generation, extended by one token at a time exactly as plain `generate` extends it.

    Each `emit` runs the logits processors once on the true prefix, chooses the token, and asks the stopping criteria.

    Args:
        input_ids: `[1, S]` int64, the prompt.
        do_sample: sample, or take the maximum.
        streamer: gets every token as soon as it is final, or None.
        scores: `()` to collect the processed logits of each emitted token, None not to.
        logits: likewise for the raw logits.
    """

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    do_sample: bool
    streamer: BaseStreamer | None = None
    scores: tuple | None = None
    logits: tuple | None = None
    finished: bool = field(default=False, init=False)
    randomness: Randomness = field(default_factory=Randomness, init=False)  # torch's global generator
    overlaps: list[tuple[int, float]] = field(default_factory=list, init=False)

    @classmethod
    def from_config(cls, input_ids, logits_processor, stopping_criteria, generation_config, streamer) -> "Emitter":
        """An emitter that collects what the request wants returned."""
        settings = generation_config
        return cls(
            input_ids,
            logits_processor,
            stopping_criteria,
            do_sample=settings.do_sample,
            streamer=streamer,
            scores=() if settings.return_dict_in_generate and settings.output_scores else None,
            logits=() if settings.return_dict_in_generate and settings.output_logits else None,
        )

    def emit(self, next_token_logits: torch.Tensor, proposal: Proposal | None = None, plain_draw: bool = True) -> int:
        """Choose and append the next token.

        Args:
            next_token_logits: `[1, V]`, the target's raw logits after the current sequence.
            proposal: the drawn children at this point of the tree, if it has any.
            plain_draw: sample by the call that plain `generate` makes, so that the same seed gives the same token. It
                takes an exponential for every token of the vocabulary, ten times the time of inverting a cumulative sum.
        """
        # a copy: processors may write into it, and the logits of the whole tree should not be kept alive
        next_token_logits = next_token_logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        next_token_scores = self.logits_processor(self.input_ids, next_token_logits)
        if self.scores is not None:
            self.scores += (next_token_scores,)
        if self.logits is not None:
            self.logits += (next_token_logits,)
        next_token = self._choose(next_token_scores, proposal, plain_draw)
        self.input_ids = torch.cat([self.input_ids, next_token], dim=-1)
        self.finished = bool(self.stopping_criteria(self.input_ids, self.scores).all())
        if self.streamer is not None:
            self.streamer.put(next_token[0].cpu())
        return int(next_token)

    def take_overlaps(self) -> list[tuple[int, float]]:
        """Depth and overlap of each proposal that was tried since the last call."""
        taken, self.overlaps = self.overlaps, []
        return taken

    def _choose(self, scores: torch.Tensor, proposal: Proposal | None, plain_draw: bool) -> torch.Tensor:
        """The chosen token, `[1, 1]`, from processed scores `[1, V]`."""
        if not self.do_sample:
            return scores.argmax(dim=-1, keepdim=True)
        p = scores.softmax(dim=-1)
        if proposal is not None:
            token, overlap = choose_with_proposal(p[0], proposal, self.randomness)
            self.overlaps.append((proposal.depth, overlap))
        elif plain_draw:
            return torch.multinomial(p, num_samples=1)
        else:
            token = self.randomness.draw(p[0])
        return torch.full_like(self.input_ids[:, :1], token)


def choose_with_proposal(p: torch.Tensor, proposal: Proposal, randomness: Randomness) -> tuple[int, float]:
    """A token distributed as p that is a child of the node as often as the proposal allows.

    Args:
        p: `[V]`, the target's distribution after all processors.
        proposal: the drawn children.
        randomness: where flips and draws come from.

    Returns:
        The token, and the overlap sum_v min(p(v), q(v)) / (1 - p(S)), q being restricted to the tokens outside the
        deterministic children S: how probable the acceptance of one draw is, once p leaves S. It estimates the same as
        the flips do, with less variance.
    """
    q = proposal.outside(p)
    outside = 1 - float(p[proposal.inside].sum())
    overlap = float(torch.minimum(p, q).sum()) / outside if outside > 0 else 0.0
    rule = k_sequential if proposal.replacement else recursive_rejection
    return rule(p, q, proposal.tokens, randomness), overlap


def recursive_rejection(p: torch.Tensor, q: torch.Tensor, tokens: list[int], randomness: Randomness) -> int:
    """Accept x_i with min(1, r(x_i) / q_i(x_i)); else r <- norm(max(0, r - q_i)); at the end y ~ r.

    r starts as p; q_i, from which x_i was drawn, is q without the deterministic children S and without x_1 .. x_{i-1}.
    Each step is speculative sampling of r by q_i, whose residual is taken over the whole vocabulary; so the result has
    distribution p for every S and any number of draws. With one draw P(accept) = sum_v min(p(v), q_1(v)), and with S
    the walk also goes on with probability p(S).

    Source: Leviathan et al. (arXiv 2211.17192), Appendix A.1, applied recursively as in Sequoia (arXiv 2402.12374).
    """
    residual = p
    for i, token in enumerate(tokens):
        if i:
            q = q.clone()
            q[tokens[i - 1]] = 0
            q = normalised(q, otherwise=q)
        if randomness.flip(float(residual[token] / q[token])):
            return token
        residual = normalised(residual - q, otherwise=residual)
    return randomness.draw(residual)


def k_sequential(p: torch.Tensor, q: torch.Tensor, tokens: list[int], randomness: Randomness) -> int:
    """Accept the first x_i with probability min(1, p(x_i) / (g q(x_i))); at the end y ~ norm(p - c min(q, p / g)).

    x_1 .. x_k are independent draws from q, b = sum_v min(q(v), p(v) / g) is the probability that one is accepted,
    c = (1 - (1 - b)^k) / b, and g solves 1 - (1 - b)^k = g b: the smallest g for which the residual is not negative.

    Source: Sun et al., SpecTr (arXiv 2310.15141), Algorithm 3 and Theorem 1.
    """
    k = len(tokens)
    gamma = solve_gamma(p, q, k)
    accepted = torch.minimum(q, p / gamma)
    for token in tokens:
        if randomness.flip(float(accepted[token] / q[token])):
            return token
    beta = float(accepted.sum())
    factor = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
    return randomness.draw(normalised(p - factor * accepted, otherwise=p))


def solve_gamma(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """The smallest g in [1, k] with 1 - (1 - b)^k <= g b, b = sum_v min(q(v), p(v) / g), from above.

    Any g that satisfies the inequality keeps the output exact; a larger one only accepts less.
    """
    low, high = 1.0, float(k)
    for _ in range(GAMMA_STEPS if k > 1 else 0):
        middle = (low + high) / 2
        beta = float(torch.minimum(q, p / middle).sum())
        if 1 - (1 - beta) ** k <= middle * beta:
            high = middle
        else:
            low = middle
    return high


def normalised(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """The positive part of `weights`, scaled to sum 1; `otherwise` if nothing is positive, which only rounding causes."""
    positive = weights.clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else otherwise


def walk_tree(tree: DraftTree, node_logits: torch.Tensor, emitter: Emitter) -> list[int]:
    """At each node emit a token of the target's distribution, and descend while it is a child.

    P(y | prefix) = p(y) at every node, whatever the tree: without drawn children because the choice never looks at the
    tree, with drawn children by rejection sampling. Greedy output is therefore the target's, and sampled output has its
    distribution. Without drawn children a seed gives the text that plain sampling gives. Exactly one token is emitted per
    node of the path; the last one left the tree or ended the generation.

    Args:
        tree: N nodes.
        node_logits: `[1, N, V]`, the target's logits at each node.
        emitter: the sequence, which ends with the root.

    Returns:
        The path, node indices from the root down: the tokens to commit. The last emitted token is not among them.
    """
    path = [0]
    while True:
        node = path[-1]
        token = emitter.emit(node_logits[:, node], tree.proposals.get(node), plain_draw=not tree.proposals)
        child = tree.child(node, token)
        if emitter.finished or child is None:
            return path
        path.append(child)
