"""Drafters: loading them, and turning what the user passed as `assistant_model` into a tree candidate generator."""

from transformers import MuseGlimmerAssistantModel, PreTrainedModel
from transformers.generation import GenerationConfig

from ..config import check_model
from ..tree import Policy
from .assistant import AssistantTreeGenerator
from .base import DraftSampling, TreeCandidateGenerator, draft_tree
from .dflash import DFlashTreeGenerator
from .dflash_model import DFlashConfig, DFlashDraftModel
from .load import load_drafter
from .prompt_lookup import PromptLookupTreeGenerator

__all__ = [
    "AssistantTreeGenerator",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashTreeGenerator",
    "DraftSampling",
    "PromptLookupTreeGenerator",
    "TreeCandidateGenerator",
    "draft_tree",
    "load_drafter",
    "tree_candidate_generator",
]


def tree_candidate_generator(
    assistant_model: PreTrainedModel | TreeCandidateGenerator | None,
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    policy: Policy,
) -> TreeCandidateGenerator:
    """The candidate generator for one `generate` call.

    Args:
        assistant_model: a DFlash drafter, a causal LM with the target's vocabulary, None for prompt look-up, or a fresh
            candidate generator of one's own.
        target: the model that generates.
        generation_config: the request's settings.
        policy: which children a node may get under sampling; prompt look-up has no q and draws none.

    Raises:
        ValueError: if the drafter does not fit the target.
    """
    if assistant_model is None:
        return PromptLookupTreeGenerator(generation_config)
    if isinstance(assistant_model, TreeCandidateGenerator):
        if assistant_model.used:
            raise ValueError("assistant_model: a candidate generator serves one generate call; make a new one.")
        assistant_model.used = True
        return assistant_model
    if getattr(assistant_model, "training", False):
        raise ValueError("assistant_model: the drafter is in training mode; call assistant_model.eval().")
    sampling = DraftSampling(generation_config, policy)
    if isinstance(assistant_model, (DFlashDraftModel, MuseGlimmerAssistantModel)):
        return DFlashTreeGenerator(assistant_model, target, sampling)
    if not isinstance(assistant_model, PreTrainedModel) or not assistant_model.can_generate():
        raise ValueError(
            f"assistant_model: a {type(assistant_model).__name__} is no drafter. Pass what hf_ddtree.load_drafter "
            "returns, a causal LM with the target's vocabulary, or None for prompt look-up."
        )
    check_model(assistant_model, argument="assistant_model", recurrent=False)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    drafter_vocab_size = assistant_model.config.get_text_config(decoder=True).vocab_size
    if drafter_vocab_size != vocab_size:
        raise ValueError(
            f"assistant_model: its vocabulary has {drafter_vocab_size} tokens, the target's {vocab_size}. A drafter "
            "needs the target's own vocabulary; pick one of the same family, or None for prompt look-up."
        )
    config, max_length = assistant_model.config.get_text_config(decoder=True), generation_config.max_length
    positions = getattr(config, "max_position_embeddings", None)
    if getattr(config, "rope_parameters", None) is None and positions is not None and max_length > positions:
        raise ValueError(
            f"assistant_model: it has learned positions for {positions} tokens, fewer than max_length={max_length}; lower "
            "max_new_tokens or choose another drafter."
        )
    return AssistantTreeGenerator(assistant_model, sampling)
