"""DFlash without a tree: the most probable token at every depth."""

from transformers import PreTrainedModel

from ..sampling.policies import POLICIES
from ..tree import DraftTree
from .dflash import DFlashDrafter
from .q import DraftSampling


class ChainDrafter(DFlashDrafter):
    """Drafts the single most probable path, whatever the budget: the baseline that a tree is compared with."""

    def draft(self, input_ids, tree_budget, max_depth):
        """Return the chain of the next round."""
        root_token_id = int(input_ids[0, -1])
        draft_logits = self.sampling.warp(self.draft_logits(root_token_id)[:max_depth])
        return DraftTree.chain([root_token_id, *draft_logits.argmax(-1).tolist()])


def chain_drafter(model: PreTrainedModel, target: PreTrainedModel) -> ChainDrafter:
    """Return a `ChainDrafter` for one `generate` call.

    Args:
        model: a DFlash model.
        target: the model that generates.
    """
    return ChainDrafter(model, target, DraftSampling(POLICIES["target"]))
