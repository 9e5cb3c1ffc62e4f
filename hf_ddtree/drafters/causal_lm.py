"""Drafting with a small causal language model that shares the target's vocabulary."""

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from .._transformers import default_generation_settings, logits_to_keep
from ..target.attention import no_router_logits, text_config
from ..target.cache import commit_path
from ..target.masks import Masks, tree_attention_mask
from ..tree import int64
from .base import Drafter
from .context import Context
from .growth import DrawnGrowth, Growth
from .q import DraftSampling


class CausalLMDrafter(Drafter):
    """Grows the tree level by level. q depends on the path, so each level costs one forward of the model.

    After each level, the best `tree_budget` nodes by path probability stay. Growth ends when no new node is among them,
    or at `num_assistant_tokens` levels. It also ends when the path probabilities of a level sum to less than
    `assistant_confidence_threshold`: the drafter then expects the walk to end earlier. Both settings come from the
    model's own generation_config, as in native assisted generation.

    With drawn children, no node is dropped after it was drawn: each level gets a share of the budget.

    The vocabularies may be padded to different sizes. A token that only the target has gets probability 0 under q, and
    one that only the drafter has is not drafted. The drafter reads token 0 where the text holds an id beyond its own
    embedding, which can only lower the acceptance.

    Args:
        model: the drafter's model.
        sampling: how to choose children.
        context: what the model has read in earlier calls.
        vocab_size: the number of the target's token ids. By default it is the drafter's own.
    """

    sampling: DraftSampling

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: DraftSampling,
        context: Context | None = None,
        vocab_size: int | None = None,
    ):
        own, defaults = model.generation_config, default_generation_settings(model.generation_config)
        self.model, self.sampling = model, sampling
        self.config = text_config(model)
        self.vocab_size = vocab_size or self.config.vocab_size
        self.max_levels = own.num_assistant_tokens or defaults["num_assistant_tokens"]
        threshold = own.assistant_confidence_threshold
        self.confidence = defaults["assistant_confidence_threshold"] if threshold is None else threshold
        self.context = context or Context()
        if self.context.cache is None:
            # Every layer keeps all rows, and the mask applies the windows. A sliding layer would count the rows of a
            # tree as if they were a sequence.
            self.context.cache = DynamicCache()
        self.cache = self.context.cache
        self.device = model.device
        self.committed = len(self.context.rows)  # tokens of the text in the cache
        self.row_of: dict[int, int] = {}  # tree node -> row among the nodes that were evaluated in this round
        self.evaluated = 0  # the number of these rows

    def draft(self, input_ids, tree_budget, max_depth):
        """Return the tree of the next round."""
        offloaded = self.model.device.type == "meta"
        self.device = input_ids.device if offloaded else self.model.device
        text = torch.cat([self.context.before.to(input_ids.device), input_ids[0]])
        root_log_probs = self._extend(text[None, self.committed :])
        self.committed = len(text)
        make_growth = DrawnGrowth if self.sampling.policy.drawn else Growth
        growth = make_growth(int(input_ids[0, -1]), tree_budget, self.sampling)
        growth.expand([0], root_log_probs)
        for _ in range(1, min(self.max_levels, max_depth)):
            frontier = growth.frontier()
            if not frontier or growth.probability(frontier) < self.confidence:
                break
            growth.expand(frontier, self._evaluate(growth, frontier))
        tree, self.row_of = growth.finish()
        self.evaluated = len(growth.evaluated)
        return tree

    def commit(self, path, hidden_states):
        """Take in the accepted path of a round."""
        # only the upper part of the path was evaluated, and the rest runs with the next root
        rows = [self.row_of[node] for node in path if node in self.row_of]
        commit_path(self.cache, rows, self.evaluated)
        self.committed += len(rows)
        self.context.rows += range(len(self.context.rows), self.committed)
        self.row_of, self.evaluated = {}, 0  # a round may pass without a draft

    def _extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run new tokens of the text, and return the log-probabilities after the last one, `[1, V]`."""
        end = self.committed + tokens.shape[1]
        positions = torch.arange(self.committed, end, dtype=torch.long, device=self.device)[None]
        return self._log_probs(tokens, positions, attention_mask=None, n_logits=1)

    def _evaluate(self, growth: Growth, frontier: list[int]) -> torch.Tensor:
        """Run the nodes of the newest level, and return the log-probabilities of their children, `[n, V]`."""
        visible = growth.evaluate(frontier)
        depths = int64([growth.depths[node] for node in growth.evaluated])
        query_depths = depths[-len(frontier) :]
        mask = tree_attention_mask(
            self.config,
            self.cache,
            query_depths - 1,  # this cache holds the root, so a node at depth 1 follows the last cached token
            depths - 1,
            visible,
            padding_mask=None,
            device=self.device,
        )
        tokens = int64([growth.token_ids[node] for node in frontier])[None]
        positions = (self.committed - 1 + query_depths)[None]
        return self._log_probs(tokens, positions, mask, n_logits=len(frontier))

    def _log_probs(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_mask: Masks | None, n_logits: int
    ) -> torch.Tensor:
        outputs = self.model(
            input_ids=tokens.where(tokens < self.config.vocab_size, 0).to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=attention_mask,
            cache=self.cache,
            use_cache=True,
            **logits_to_keep(self.model, n_logits),
            **no_router_logits(self.model),
        )
        logits = outputs.logits[0, -n_logits:, : self.vocab_size]
        if not logits.amax(dim=-1).isfinite().all():
            raise ValueError(
                "assistant_model: its logits contain NaN or infinity, or nothing but minus infinity; its weights are "
                "broken, or its dtype overflows."
            )
        logits = pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)
        return self.sampling.warp(logits).log_softmax(dim=-1)
