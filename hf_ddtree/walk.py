"""The walk down a verified tree, which chooses every token as plain `generate` would."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .request import Request
from .sampling.randomness import Randomness
from .sampling.rejection import choose_with_proposal
from .target.masks import first_valid
from .tree import DraftTree, Proposal


@dataclass
class Emitter:
    """The sequence of one row, extended by one token at a time exactly as plain `generate` extends it.

    Each `emit` runs the logits processors once on the true prefix, chooses the token, and asks the stopping criteria.

    Args:
        input_ids: `[1, S]` int64, the prompt.
        logits_processor: the processors of the call.
        stopping_criteria: the stopping criteria of the call.
        do_sample: whether to sample, instead of taking the maximum.
        streamer: receives every token as soon as it is final. None for no streaming.
        scores: `()` to collect the processed logits of each emitted token, None not to.
        logits: `()` to collect the raw logits of each emitted token, None not to.
        n_padding: the number of padding tokens at the left of the prompt.
    """

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    do_sample: bool
    streamer: BaseStreamer | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    n_padding: int = 0
    finished: bool = field(default=False, init=False)
    randomness: Randomness = field(default_factory=Randomness, init=False)  # torch's global generator
    overlaps: list[tuple[int, float]] = field(default_factory=list, init=False)

    @classmethod
    def from_request(
        cls,
        request: Request,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        attention_mask: torch.Tensor | None,
    ) -> "Emitter":
        """Return an emitter that collects what the request asks to return.

        Args:
            request: the request.
            input_ids: `[1, S]` int64, the prompt.
            logits_processor: the processors of the call.
            stopping_criteria: the stopping criteria of the call.
            streamer: receives every token, or None.
            attention_mask: `[1, S]` or longer, ending with the prompt's mask. None without padding.
        """
        return cls(
            input_ids,
            logits_processor,
            stopping_criteria,
            do_sample=request.do_sample,
            streamer=streamer,
            scores=() if request.keep_scores else None,
            logits=() if request.keep_logits else None,
            n_padding=count_padding(input_ids, attention_mask),
        )

    @property
    def length(self) -> int:
        """The length of the sequence, padding included."""
        return self.input_ids.shape[1]

    @property
    def sequence(self) -> torch.Tensor:
        """`[1, S]` int64, the sequence without padding."""
        return self.input_ids[:, self.n_padding :]

    def emit(self, next_token_logits: torch.Tensor, proposal: Proposal | None = None, plain_draw: bool = True) -> int:
        """Choose and append the next token, and return it.

        Args:
            next_token_logits: `[1, V]`, the target's raw logits after the current sequence.
            proposal: the drawn children at this node of the tree, if it has any.
            plain_draw: sample by the call that plain `generate` makes, so that the same seed gives the same token. That
                call draws an exponential for every token of the vocabulary, which takes ten times as long as inverting
                a cumulative sum.
        """
        # a copy, because processors may write into it, and because a view would keep the logits of the whole tree alive
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
        """Return the depth and overlap of each proposal that was tried since the last call."""
        taken, self.overlaps = self.overlaps, []
        return taken

    def _choose(self, scores: torch.Tensor, proposal: Proposal | None, plain_draw: bool) -> torch.Tensor:
        """Return the chosen token, `[1, 1]`, from processed scores `[1, V]`."""
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


def count_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """Return the number of padding tokens at the left of the prompt.

    Args:
        input_ids: `[1, S]` int64.
        attention_mask: `[1, S]` or longer, ending with the prompt's mask. None without padding.
    """
    n = input_ids.shape[1]
    return 0 if attention_mask is None or n == 0 else first_valid(attention_mask[0, -n:])


def walk_tree(tree: DraftTree, node_logits: torch.Tensor, emitter: Emitter) -> list[int]:
    """At each node, emit a token of the target's distribution, and descend while it is a child. Return the path.

    P(y | prefix) = p(y) at every node, whatever the tree. Without drawn children, the choice never looks at the tree.
    With drawn children, rejection sampling keeps the distribution. Greedy output is therefore the target's own, and
    sampled output has its distribution. Without drawn children, a seed gives the text that plain sampling gives. The
    walk emits exactly one token per node of the path. The last one, the bonus token, left the tree or ended the
    generation.

    Args:
        tree: N nodes.
        node_logits: `[1, N, V]`, the target's logits at each node.
        emitter: the sequence, which ends with the root.

    Returns:
        The path, node indices from the root down: the tokens to commit. The bonus token is not among them.
    """
    path = [0]
    while True:
        node = path[-1]
        token = emitter.emit(node_logits[:, node], tree.proposals.get(node), plain_draw=not tree.proposals)
        child = tree.child(node, token)
        if emitter.finished or child is None:
            return path
        path.append(child)
