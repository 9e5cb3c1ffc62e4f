"""Config fields of small models of every supported family, as data."""

from typing import Any

VOCAB_SIZE = 128
WINDOW = 16  # tokens that sliding layers of the tiny models see. Every test exceeds it.

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # large weights, so that logits depend on every token that a node sees, and one wrong key changes them visibly
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
OMITTED = "omitted"  # the value of a field of SHAPE that a config does not take
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWED = {"sliding_window": WINDOW}
# not tied: with scaled embeddings of this size, a tied head would repeat the last token for ever
_GEMMA = {**_WINDOWED, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}

# the supported attention families, each with the fields that make it special
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_windowed": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2, **_WINDOWED},
    "mistral": _WINDOWED,
    "gemma2": {**_GEMMA, "attn_implementation": "eager"},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 2},
    "gpt_oss": {**_WINDOWED, **_EXPERTS, "attn_implementation": "eager"},
    "deepseek_v3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 2},
    "mixtral": _EXPERTS,
    "gpt2": {"n_positions": 512},
    "phi3": _WINDOWED,
    "olmo2": {},
    "smollm3": {},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "muse_glimmer": _WINDOWED,
}

_ALTERNATING = {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA_3N = {**_GEMMA, **_ALTERNATING, **_PER_LAYER, "laurel_rank": 8, "altup_num_inputs": 2}
_GEMMA_4 = {**_GEMMA, **_ALTERNATING, **_PER_LAYER, "global_head_dim": 16, "num_global_key_value_heads": 1}
_GPT_J = {"n_embd": 32, "n_head": 4, "n_layer": 4, "rotary_dim": 4, "n_positions": 512}
# Supported attention families whose masks, positions and caches are those of a family above. The tests try fewer
# drafters with them.
FURTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "codegen": _GPT_J,
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True},
    "cohere2": {**_WINDOWED, "logit_scale": 1.0},
    "cwm": _WINDOWED,
    "deepseek_v2": FAMILIES["deepseek_v3"],
    "dots1": {**_ALTERNATING, **_ROUTED},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "exaone4": _ALTERNATING,
    "exaone_moe": {**_ALTERNATING, **_ROUTED, "num_experts": 4, "num_shared_experts": 1},
    "falcon": {"head_dim": OMITTED},
    "falcon_grouped": {
        "model_type": "falcon",
        "head_dim": OMITTED,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "flex_olmo": _EXPERTS,
    "gemma": {"tie_word_embeddings": False},
    "gemma3n_text": {**_GEMMA_3N, "num_kv_shared_layers": 0},
    "gemma3n_shared": {"model_type": "gemma3n_text", **_GEMMA_3N, "num_kv_shared_layers": 2},
    "gemma4": _GEMMA_4,  # text through the multimodal class
    "gemma4_text": _GEMMA_4,
    "gemma4_shared": {"model_type": "gemma4_text", **_GEMMA_4, "num_kv_shared_layers": 2},
    "gemma4_experts": {
        "model_type": "gemma4_text",
        **_GEMMA_4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": _ROUTED,
    "gpt_neox": {},
    "gptj": _GPT_J,
    "granite_swa": {**_WINDOWED, "attn_implementation": "eager"},
    "granitemoe": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "jetmoe": {**_EXPERTS, "kv_channels": 8},
    "minimax_m2": {**_EXPERTS, "rotary_dim": 4},
    "ministral": _WINDOWED,
    "nanochat": {},
    "nemotron": {},
    "olmoe": _EXPERTS,
    "persimmon": {},
    "phi": {},
    "phimoe": {**_WINDOWED, **_EXPERTS},
    "qwen2_moe": {
        **_WINDOWED,
        **_EXPERTS,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "shared_expert_intermediate_size": 32,
    },
    "seed_oss": {},
    "stablelm": {},
    "starcoder2": _WINDOWED,
    "vaultgemma": {**_GEMMA, "attn_implementation": "eager"},
}

_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
# families with Gated DeltaNet layers, verified in one forward
GATED_DELTA_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5": _DELTA_NET,  # text through the multimodal classes
    "qwen3_5_moe": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
}
# families with other recurrent layers, verified path by path
RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64, "conv_L_cache": 3},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "olmo_hybrid": _DELTA_NET,
}
# families whose layers compute something else over several cached tokens than token by token. They are refused.
INCONSISTENT_FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "expand": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW},
}
ALL_FAMILIES = FAMILIES | FURTHER_FAMILIES | GATED_DELTA_FAMILIES | RECURRENT_FAMILIES | INCONSISTENT_FAMILIES

_VISION = {"hidden_size": 16, "intermediate_size": 32}
_QWEN_VISION = {
    "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    "image_token_id": 124,
    "video_token_id": 125,
    "vision_start_token_id": 126,
    "vision_end_token_id": 127,
}
# fields around the text config of families that come with a vision part
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": {"model_type": "gemma4_text"}},
    "muse_glimmer": {
        "text_config": {},
        "vision_config": {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2},
        "projector_hidden_size": 32,
    },
    "qwen3_5": {**_QWEN_VISION, "text_config": {"model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {**_QWEN_VISION, "text_config": {"model_type": "qwen3_5_moe_text"}},
}
