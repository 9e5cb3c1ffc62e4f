"""The walk down a verified tree, choosing every token as plain `generate` would."""

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .tree import DraftTree


@dataclass
class Emitter:
    """The sequence under generation, extended by one token at a time exactly as plain `generate` extends it.

    Each `emit` runs the logits processors once on the true prefix, chooses the token, and asks the stopping criteria.
    Under sampling it draws one `torch.multinomial` from the global generator, so a seed gives the text that plain
    sampling gives.

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

    def emit(self, next_token_logits: torch.Tensor) -> int:
        """Choose and append the next token.

        Args:
            next_token_logits: `[1, V]`, the target's raw logits after the current sequence.
        """
        # a copy: processors may write into it, and the logits of the whole tree should not be kept alive
        next_token_logits = next_token_logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        next_token_scores = self.logits_processor(self.input_ids, next_token_logits)
        if self.scores is not None:
            self.scores += (next_token_scores,)
        if self.logits is not None:
            self.logits += (next_token_logits,)
        if self.do_sample:
            next_token = torch.multinomial(next_token_scores.softmax(dim=-1), num_samples=1)
        else:
            next_token = next_token_scores.argmax(dim=-1, keepdim=True)
        self.input_ids = torch.cat([self.input_ids, next_token], dim=-1)
        self.finished = bool(self.stopping_criteria(self.input_ids, self.scores).all())
        if self.streamer is not None:
            self.streamer.put(next_token[0].cpu())
        return int(next_token)


def walk_tree(tree: DraftTree, node_logits: torch.Tensor, emitter: Emitter) -> list[int]:
    """At each node emit the target's own choice, and descend while that choice is a child.

    P(y | prefix) = p(y) at every node whatever the tree, since the choice never looks at it: greedy output is the
    target's, sampled output has its distribution. Exactly one token is emitted per node of the path; the last one left
    the tree or ended the generation.

    Args:
        tree: N nodes.
        node_logits: `[1, N, V]`, the target's logits at each node.
        emitter: the sequence, which ends with the root.

    Returns:
        The path, node indices from the root down: the tokens to commit. The last emitted token is not among them.
    """
    path = [0]
    while True:
        token = emitter.emit(node_logits[:, path[-1]])
        child = tree.child(path[-1], token)
        if emitter.finished or child is None:
            return path
        path.append(child)
