"""Every private name of transformers that this package uses, each behind one wrapper.

A private name can move with any minor release. Each wrapper says which name it uses, why, and what would replace it.
Differences between releases are chosen by what is there, not by version numbers. tests/test_transformers_surface.py
lists the same names and fails with a list of everything that moved.

Three groups cannot be wrapped, because they are overridden or found by name:

- The hooks of `generate` that `enable` overrides: `_prepare_generation_config`, `_validate_generation_mode`,
  `_assisted_decoding`, `_sample`, `load_custom_generate`. There is no public way to add a decoding method that receives
  `assistant_model`, `streamer` and `tokenizer`. A public registry of such methods would replace them.
- The cache layers (target/cache.py), whose class decides how a layer commits a path. A public method that keeps some of
  the last rows would replace them.
- The functions of modelling files that target/attention.py and target/gated_delta.py patch by name.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.utils import ModelOutput


def run_prefill(
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


def default_generation_settings(generation_config: GenerationConfig) -> dict[str, Any]:
    """Return transformers' global defaults of the generation settings.

    Private name: `GenerationConfig._get_default_generation_params`. Unset settings are None, and `generate` fills them
    in from here.
    """
    return generation_config._get_default_generation_params()


@contextmanager
def past_recording(cache: Cache) -> Iterator[None]:
    """Let the layers of a cache keep all rows of a forward until the next `crop_rows`, inside the context.

    Afterwards every layer records as much as before.

    Private names: the attributes `record_past` and `recurrent_states_to_keep` of cache layers.
    `Cache.activate_past_recording` cannot be undone, and recording costs memory in every later prefill. From 5.25 on,
    layers also keep the last `recurrent_states_to_keep` recurrent states, and models fail without a number. Zero is
    right for trees, because none of these is the state after a scattered path. `TreeStates.commit` computes that one.
    5.24 ignores the attribute. A public way to stop recording, with a default number of states, would replace both.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionLayer)]
    before = [(layer.record_past, getattr(layer, "recurrent_states_to_keep", 0)) for layer in layers]
    cache.activate_past_recording()
    for layer in layers:
        layer.recurrent_states_to_keep = 0
    try:
        yield
    finally:
        for layer, (record_past, recurrent_states_to_keep) in zip(layers, before, strict=True):
            layer.record_past, layer.recurrent_states_to_keep = record_past, recurrent_states_to_keep


def crop_rows(layer: Any, n_rows: int) -> None:
    """Drop the last `n_rows` rows of a cache layer, and leave its recurrent states as they are.

    Sliding layers and convolutions are also trimmed back to their window, so the call has an effect even for 0 rows.

    Private names: the attributes `recurrent_states` and `recurrent_states_history` of `LinearAttentionLayer`. From 5.25
    on, `crop` restores the recurrent state that the layer recorded `n_rows` tokens ago. The nodes of a tree are not a
    sequence, so no such state exists. The history therefore repeats the present state, which `crop` then keeps. In 5.24
    `crop` never touches recurrent states and ignores the history. An argument of `crop` that leaves recurrent states
    alone would replace it.
    """
    if isinstance(layer, LinearAttentionLayer):
        layer.recurrent_states_history = {index: [state] * n_rows for index, state in layer.recurrent_states.items()}
    layer.crop(-n_rows)


def empty_cache(cache_class: type[Cache], config: PreTrainedConfig) -> Cache:
    """Return an empty cache that works under every default device of the process.

    Private knowledge: some layers keep a number in a tensor, which they move to the device of the first states. These
    are `_sliding_window_tensor` of sliding layers and, from 5.25 on, `cumulative_length_linear` of recurrent layers.
    Under the default device "meta", the number would have no value. A constructor that names the device would replace
    this wrapper.
    """
    with torch.device("cpu"):
        return cache_class(config=config)


def cached_tokens(cache: Cache) -> int:
    """Return the number of tokens in a cache, as its first attention layer counts them, or 0 without such a layer.

    Private knowledge: attention layers count their tokens as an int. From 5.25 on, `Cache.get_seq_length` asks the
    first layer. If that is a recurrent one, it answers with the tensor in which it counts, so the caller's number would
    grow with every forward. `Cache.get_seq_length` will replace this once it returns an int.
    """
    return next((layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)), 0)
