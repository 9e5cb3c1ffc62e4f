"""The private parts of transformers that this package relies on. A new release fails here with a list of what moved.

The tables name what must be there. They say nothing about behaviour, which other tests check.
"""

import functools
import importlib
import inspect
from importlib.util import find_spec

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, MuseGlimmerAssistantConfig
from transformers.cache_utils import DFlashCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

GU = "transformers.generation.utils"
MIXIN = "transformers.GenerationMixin"
CACHES = "transformers.cache_utils"
QWEN3 = "transformers.models.qwen3.modeling_qwen3"
TINY = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}

# path -> the parameters that it must have, in this order. "**" means that it takes any further keyword.
CALLABLES = {
    # the hooks of `generate` that an enabled class overrides
    f"{MIXIN}._prepare_generation_config": "generation_config **",
    f"{MIXIN}._validate_generation_mode": "generation_mode generation_config generation_mode_kwargs",
    f"{MIXIN}._assisted_decoding": (
        "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer "
        "assistant_model tokenizer **"
    ),
    f"{MIXIN}._sample": "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer **",
    f"{MIXIN}.load_custom_generate": "**",
    # public methods that it overrides, too
    f"{MIXIN}.generate": "inputs generation_config streamer **",
    f"{MIXIN}.generate_batch": "inputs generation_config **",
    f"{MIXIN}.init_continuous_batching": "generation_config",
    f"{MIXIN}.continuous_batching_context_manager": "generation_config",
    # what the decoding loop calls
    f"{MIXIN}._prefill": "input_ids generation_config model_kwargs",
    f"{MIXIN}._update_model_kwargs_for_generation": "outputs model_kwargs num_new_tokens",
    f"{MIXIN}._optimize_model_for_decode": "",
    f"{MIXIN}._supports_logits_to_keep": "",
    f"{MIXIN}.prepare_inputs_for_generation": "input_ids is_first_iteration **",
    "transformers.GenerationConfig._get_default_generation_params": "",
    "transformers.PreTrainedConfig.get_text_config": "decoder",
    "transformers.PreTrainedConfig.get_config_dict": "pretrained_model_name_or_path **",
    # caches
    "transformers.Cache.activate_past_recording": "",
    "transformers.Cache.get_seq_length": "",
    "transformers.Cache.get_mask_sizes": "query_length layer_idx",
    "transformers.Cache.reorder_cache": "beam_idx",
    f"{CACHES}.DynamicLayer.crop": "tokens_to_remove",
    f"{CACHES}.DynamicSlidingWindowLayer.crop": "tokens_to_remove",
    f"{CACHES}.LinearAttentionLayer.crop": "tokens_to_remove",
    f"{CACHES}.DummyLayer.crop": "tokens_to_remove",
    f"{CACHES}.DFlashCache.crop": "tokens_to_remove",
    f"{CACHES}.DFlashCache.set_previous_accepted_tokens": "number_of_accepted_tokens",
    # attention, replaced during a tree forward
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": (
        "module query key value attention_mask scaling position_bias **"
    ),
    "transformers.AttentionInterface.get_interface": "attn_implementation default",
    **{
        f"transformers.models.{name}.modeling_{name}.eager_attention_forward": (
            "module query key value attention_mask scaling **"
        )
        for name in ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "muse_glimmer")
    },
    # Gated DeltaNet, replaced during a tree forward
    **{
        f"transformers.models.{name}.modeling_{name}.{function}": parameters
        for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
        for function, parameters in {
            "causal_conv1d_fn": "hidden_states weight bias activation **",
            "torch_chunk_gated_delta_rule": "query key value g beta initial_state use_qk_l2norm_in_kernel **",
            "torch_recurrent_gated_delta_rule": "query key value g beta initial_state use_qk_l2norm_in_kernel **",
        }.items()
    },
    # drafters
    "transformers.MuseGlimmerAssistantModel.forward": (
        "noise_embeds context_hidden_states attention_mask position_ids cache"
    ),
    "transformers.masking_utils.create_bidirectional_sliding_window_mask": "config inputs_embeds attention_mask cache",
    f"{QWEN3}.Qwen3Attention.__init__": "config layer_idx",
    f"{QWEN3}.Qwen3DecoderLayer.__init__": "config layer_idx",
    f"{QWEN3}.Qwen3DecoderLayer.forward": "hidden_states attention_mask cache position_embeddings **",
    f"{QWEN3}.Qwen3RMSNorm.__init__": "hidden_size eps",
    f"{QWEN3}.Qwen3RotaryEmbedding.__init__": "config",
    f"{QWEN3}.Qwen3RotaryEmbedding.forward": "x position_ids",
    f"{QWEN3}.rotate_half": "x",
}

ATTRIBUTES = [
    "transformers.PreTrainedModel._supports_attention_backend",
    "transformers.PreTrainedModel._no_split_modules",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
    "transformers.PreTrainedConfig._attn_implementation",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS",
    # It finds models by the name of their class, so an enabled class keeps the name.
    "transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
    "transformers.Cache.is_linear",
    "transformers.Cache.is_sliding",
    f"{QWEN3}.Qwen3PreTrainedModel",
    *(["triton.knobs.runtime.interpret"] if find_spec("triton") else []),
]

# mapping -> a key or value it must hold
MEMBERS = {
    "transformers.AttentionInterface._global_mapping": "sdpa",
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "LlamaForCausalLM",
    f"{GU}.GENERATION_MODES_MAPPING": "_assisted_decoding",
}

SUBCLASSES = [
    (f"{CACHES}.DynamicSlidingWindowLayer", f"{CACHES}.DynamicLayer"),
    (f"{CACHES}.LinearAttentionAndFullAttentionLayer", f"{CACHES}.DynamicLayer"),
    (f"{CACHES}.LinearAttentionAndFullAttentionLayer", f"{CACHES}.LinearAttentionLayer"),
    (f"{CACHES}.LinearAttentionAndSlidingWindowAttentionLayer", f"{CACHES}.DynamicSlidingWindowLayer"),
    (f"{CACHES}.LinearAttentionAndSlidingWindowAttentionLayer", f"{CACHES}.LinearAttentionLayer"),
    ("transformers.generation.GenerateDecoderOnlyOutput", "transformers.utils.ModelOutput"),
]


def qwen3_attention():
    module = importlib.import_module(QWEN3)
    return module.Qwen3Attention(Qwen3Config(**TINY, head_dim=4), layer_idx=0)


def normed_embedding():
    module = importlib.import_module("transformers.models.muse_glimmer.modeling_muse_glimmer")
    return module.MuseGlimmerTextNormedEmbedding(8, 8, None)


# The attributes that an object must have. A function makes the object, so that a failure to make it is reported, too.
INSTANCES = {
    "DynamicCache()": (DynamicCache, "layers offloading"),
    "DFlashCache()": (DFlashCache, "layers"),
    "DynamicLayer()": (DynamicLayer, "keys values is_initialized"),
    "DynamicSlidingWindowLayer(4)": (
        functools.partial(DynamicSlidingWindowLayer, 4),
        "keys values is_initialized sliding_window record_past",
    ),
    "LinearAttentionLayer()": (LinearAttentionLayer, "conv_states conv_kernel_size recurrent_states record_past"),
    "Qwen3Attention(...)": (
        qwen3_attention,
        "q_proj k_proj v_proj o_proj q_norm k_norm head_dim scaling sliding_window attention_dropout is_causal",
    ),
    "MuseGlimmerTextNormedEmbedding(...)": (normed_embedding, "embed_norm weight padding_idx"),
    "MuseGlimmerAssistantConfig()": (MuseGlimmerAssistantConfig, "block_size mask_token_id target_layer_ids"),
    "LlamaConfig()": (LlamaConfig, "rope_parameters max_position_embeddings is_encoder_decoder model_type"),
    "GenerationConfig()": (
        GenerationConfig,
        "num_beams num_beam_groups constraints force_words_ids penalty_alpha dola_layers prompt_lookup_num_tokens "
        "max_matching_ngram_size num_return_sequences use_cache cache_implementation output_attentions "
        "output_hidden_states use_mtp assistant_early_exit assistant_ensemble_weight num_assistant_tokens "
        "speculation_type compile_config "
        "assistant_confidence_threshold prefill_chunk_size return_dict_in_generate output_scores output_logits",
    ),
}

# Everything that cache layers remember. If a release adds something, dropping a branch may have to undo it.
STATE = {
    "DynamicLayer()": {"keys", "values", "is_initialized"},
    "DynamicSlidingWindowLayer(4)": {
        *("keys", "values", "is_initialized", "sliding_window", "_sliding_window_tensor", "cumulative_length"),
        "record_past",
    },
    "LinearAttentionLayer()": {
        *("conv_states", "conv_kernel_size", "recurrent_states", "record_past", "device", "dtype"),
        *("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "number_of_states"),
        # from 5.25 on
        *("cumulative_length_linear", "recurrent_states_history", "recurrent_states_to_keep"),
    },
}


def resolve(path: str):
    """Return the object at a dotted path: a module as far as there is one, then attributes."""
    names = path.split(".")
    found = importlib.import_module(names[0])
    for i, name in enumerate(names[1:], start=2):
        if not hasattr(found, name) and hasattr(found, "__path__"):  # a package whose module was not imported yet
            importlib.import_module(".".join(names[:i]))
        found = getattr(found, name)
    return found


def check_callable(path: str, wanted: str) -> str | None:
    """Return what is wrong with the parameters of a function, or None."""
    found = resolve(path)
    if isinstance(found, torch.nn.Module):  # the package `kernels` turns functions into modules
        found = found.forward
    parameters = inspect.signature(found).parameters
    names = list(parameters)
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    needed = [name for name in wanted.split() if name != "**"]
    if any_keyword and any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return None  # the package `kernels` wraps constructors like this
    signature = f"its parameters are now ({', '.join(map(str, parameters.values()))})"
    if missing := [name for name in needed if name not in names]:
        return f"it has no parameter {', '.join(missing)}; {signature}"
    if needed != sorted(needed, key=names.index):
        return f"its parameters {', '.join(needed)} come in another order; {signature}"
    if "**" in wanted and not any_keyword:
        return f"it takes no further keywords; {signature}"
    return None


def check_attribute(path: str) -> None:
    resolve(path)  # an attribute that is missing raises an error, which `moved` reports


def check_member(path: str, member: str) -> str | None:
    mapping = resolve(path)
    return None if member in mapping or member in mapping.values() else f"it does not hold {member!r}"


def check_subclass(path: str, base: str) -> str | None:
    return None if issubclass(resolve(path), resolve(base)) else f"it is not a subclass of {base}"


def check_instance(name: str) -> str | None:
    make, wanted = INSTANCES[name]
    instance = make()
    missing = [attribute for attribute in wanted.split() if not hasattr(instance, attribute)]
    if hasattr(instance, "activate_past_recording"):
        instance.activate_past_recording()
    unknown = set(vars(instance)) - STATE[name] if name in STATE else ()
    problems = [f"it has no attribute {', '.join(missing)}"] if missing else []
    problems += [f"it remembers something new: {', '.join(sorted(unknown))}"] if unknown else []
    return "; ".join(problems) or None


def moved() -> list[str]:
    """Return one line for everything that is missing or different."""
    checks = [(path, functools.partial(check_callable, path, wanted)) for path, wanted in CALLABLES.items()]
    checks += [(path, functools.partial(check_attribute, path)) for path in ATTRIBUTES]
    checks += [(path, functools.partial(check_member, path, member)) for path, member in MEMBERS.items()]
    checks += [(path, functools.partial(check_subclass, path, base)) for path, base in SUBCLASSES]
    checks += [(name, functools.partial(check_instance, name)) for name in INSTANCES]
    lines = []
    for name, check in checks:
        try:
            problem = check()
        except Exception as error:  # a new release may raise anything, and its message is the report
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            lines.append(f"{name}: {problem}")
    return lines


def test_moved_finds_every_private_name_where_it_was():
    lines = moved()
    assert not lines, f"{len(lines)} private parts of transformers moved:\n" + "\n".join(f"- {line}" for line in lines)


@pytest.mark.parametrize(
    "path, name, new, expected",
    [
        ("transformers.GenerationMixin", "_prefill", None, "_prefill: AttributeError"),
        ("transformers.GenerationMixin", "_prefill", lambda self, input_ids: None, "no parameter generation_config"),
        ("transformers.AttentionInterface", "_global_mapping", {}, "does not hold 'sdpa'"),
    ],
)
def test_moved_names_what_is_gone_or_changed(monkeypatch, path, name, new, expected):
    owner = resolve(path)
    monkeypatch.delattr(owner, name) if new is None else monkeypatch.setattr(owner, name, new)
    [line] = moved()
    assert expected in line
