"""The drafter of one call, from what the user passed as `assistant_model`."""

from transformers import MuseGlimmerAssistantModel, PreTrainedModel

from ..request import Request
from ..target.attention import text_config
from .base import Drafter
from .causal_lm import CausalLMDrafter
from .context import Context
from .dflash import DFlashDrafter
from .dflash_model import DFlashDraftModel
from .prompt_lookup import PromptLookupDrafter
from .q import DraftSampling

DFLASH_MODELS = (DFlashDraftModel, MuseGlimmerAssistantModel)


def choose_drafter(
    assistant_model: PreTrainedModel | Drafter | None,
    target: PreTrainedModel,
    request: Request,
    context: Context | None = None,
) -> Drafter:
    """Return the drafter of one `generate` call.

    Args:
        assistant_model: a DFlash model, a causal LM with the target's vocabulary, None for prompt look-up, or a drafter
            of the user's own. It must have passed `checks.check_assistant`.
        target: the model that generates.
        request: the request.
        context: what a model has read in earlier calls. Drafters without a model do not use it.
    """
    if assistant_model is None:
        return PromptLookupDrafter(request.lookup_depth, request.lookup_match)
    if isinstance(assistant_model, Drafter):
        assistant_model.used = True
        return assistant_model
    sampling = DraftSampling(request.policy, request.warpers)
    if isinstance(assistant_model, DFLASH_MODELS):
        return DFlashDrafter(assistant_model, target, sampling, context)
    return CausalLMDrafter(assistant_model, sampling, context, text_config(target).vocab_size)
