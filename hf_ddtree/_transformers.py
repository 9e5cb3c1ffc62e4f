"""Every private name of transformers that this package uses, each behind one wrapper.

A private name can move with any minor release. Each wrapper says which name it uses, why, and what would replace it.
Differences between releases are chosen by what is there, not by version numbers. tests/test_transformers_surface.py
lists the same names and fails with a list of everything that moved.

Three groups cannot be wrapped, because they are overridden or found by name:

- The hooks of `generate` that `enable` overrides: `_prepare_generation_config`, `_validate_generation_mode`,
  `_assisted_decoding`, `load_custom_generate`, `generate_batch`. There is no public way to add a decoding method that
  receives `assistant_model`, `streamer` and `tokenizer`; a public registry of decoding methods would replace them.
- The cache layers (target/cache.py), whose class decides how a layer commits a path. A public method that keeps some of
  the last rows would replace them.
- The functions of modelling files that target/attention.py and target/gated_delta.py patch by name.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from transformers import AttentionInterface, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput


def prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> ModelOutput:
    """Run the prompt through the model as plain `generate` does, in chunks if `prefill_chunk_size` asks for them.

    Private name: `GenerationMixin._prefill`. It slices the prompt when a filled cache was passed, and prepares
    multimodal inputs. A public prefill would replace it.
    """
    return model._prefill(input_ids, generation_config, model_kwargs)


def extend_model_kwargs(
    model: PreTrainedModel, outputs: ModelOutput, model_kwargs: dict[str, Any], n_tokens: int
) -> dict[str, Any]:
    """Extend `attention_mask`, `position_ids` and token types by `n_tokens` new tokens.

    Private name: `GenerationMixin._update_model_kwargs_for_generation`, which some families override.
    """
    return model._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=n_tokens)


def optimized_for_decoding(model: PreTrainedModel):
    """Return the context manager in which plain `generate` decodes. It may choose faster functions for experts.

    Private name: `GenerationMixin._optimize_model_for_decode`.
    """
    return model._optimize_model_for_decode()


def attention_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention function: "sdpa", "eager", ...

    Private name: `PreTrainedConfig._attn_implementation`. There is a public setter, `set_attn_implementation`, but no
    public getter.
    """
    return config._attn_implementation


def attention_functions() -> MutableMapping:
    """Return the attention functions that layers look up by name.

    Private name: `AttentionInterface._global_mapping`. The public `AttentionInterface.register` cannot put back the
    function that was there before.
    """
    return AttentionInterface._global_mapping


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether the layers of the model attend through `AttentionInterface`.

    Private name: `PreTrainedModel._supports_attention_backend`.
    """
    return model._supports_attention_backend


def logits_to_keep(model: PreTrainedModel, n: int) -> dict[str, int]:
    """Return the keyword argument that makes a forward compute the last `n` logits only, if the model takes it.

    Private name: `GenerationMixin._supports_logits_to_keep`.
    """
    return {"logits_to_keep": n} if model._supports_logits_to_keep() else {}


def is_stateful(model: PreTrainedModel) -> bool:
    """Return whether the model carries a recurrent state.

    Private name: `PreTrainedModel._is_stateful`.
    """
    return model._is_stateful


def default_generation_settings(generation_config: GenerationConfig) -> dict[str, Any]:
    """Return transformers' global defaults of the generation settings.

    Private name: `GenerationConfig._get_default_generation_params`. Unset settings are None, and `generate` fills them
    in from here.
    """
    return generation_config._get_default_generation_params()
