"""Small random models and drafters of every supported kind, for tests of this package and of code built on it."""

import copy
import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from .drafters import DFlashConfig, DFlashDraftModel, TreeCandidateGenerator
from .tree import DraftTree

VOCAB_SIZE = 128
WINDOW = 16  # sliding layers of the tiny models see so few tokens that every test passes the window

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # large weights: logits then depend on every token a node sees, so that one wrong key changes them visibly
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWED = {"sliding_window": WINDOW}
# tied to scaled embeddings of this size, the head would repeat the last token for ever
_GEMMA = {**_WINDOWED, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}

# the supported families, each with what makes it special
FAMILIES = {
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
# with Gated DeltaNet layers, verified in one forward
GATED_DELTA_FAMILIES = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5": _DELTA_NET,  # text through the multimodal classes
    "qwen3_5_moe": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
}
# with other recurrent layers, verified path by path
RECURRENT_FAMILIES = {
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
# with layers that compute something else over several cached tokens than token by token: refused
INCONSISTENT_FAMILIES = {
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
ALL_FAMILIES = FAMILIES | GATED_DELTA_FAMILIES | RECURRENT_FAMILIES | INCONSISTENT_FAMILIES

_VISION = {"hidden_size": 16, "intermediate_size": 32}
_QWEN_VISION = {
    "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    "image_token_id": 124,
    "video_token_id": 125,
    "vision_start_token_id": 126,
    "vision_end_token_id": 127,
}
# the fields around the text config
_MULTIMODAL = {
    "muse_glimmer": {
        "text_config": {},
        "vision_config": {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2},
        "projector_hidden_size": 32,
    },
    "qwen3_5": {**_QWEN_VISION, "text_config": {"model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {**_QWEN_VISION, "text_config": {"model_type": "qwen3_5_moe_text"}},
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random fp32 model of a few thousand weights in evaluation mode, on the CPU.

    Args:
        family: a key of `FAMILIES`, `GATED_DELTA_FAMILIES`, `RECURRENT_FAMILIES` or `INCONSISTENT_FAMILIES`.
        seed: of the weights; the global random state is left alone.
        overrides: config fields, and `attn_implementation`.
    """
    fields = {**_SHAPE, **ALL_FAMILIES[family], **overrides}
    model_type = fields.pop("model_type", family)
    attn_implementation = fields.pop("attn_implementation", "sdpa")
    model_class = AutoModelForCausalLM
    if model_type in _MULTIMODAL:
        model_class = AutoModelForImageTextToText
        fields = {**_MULTIMODAL[model_type], "text_config": {**_MULTIMODAL[model_type]["text_config"], **fields}}
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32).eval()


def tiny_dflash_drafter(target: PreTrainedModel, seed: int = 0, **overrides) -> DFlashDraftModel:
    """A random DFlash drafter that fits `target`; `overrides` are config fields."""
    text_config = target.config.get_text_config(decoder=True)
    fields = {
        **_SHAPE,
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        "num_hidden_layers": 2,
        "num_target_layers": text_config.num_hidden_layers,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, text_config.num_hidden_layers - 2]},
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DFlashDraftModel(DFlashConfig(**fields))
    return drafter.to(target.dtype).eval()


def tiny_muse_glimmer_drafter(target: PreTrainedModel, seed: int = 0) -> MuseGlimmerAssistantModel:
    """transformers' own DFlash drafter, random, for `target`."""
    text_config = target.config.get_text_config(decoder=True)
    fields = {name: value for name, value in _SHAPE.items() if name != "vocab_size"}
    config = MuseGlimmerAssistantConfig(
        **{**fields, "hidden_size": text_config.hidden_size, "num_hidden_layers": 2},
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=5,
        mask_token_id=3,
        target_layer_ids=[0, 2],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MuseGlimmerAssistantModel(config).to(target.dtype).eval()


def truncated_copy(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A causal-LM drafter: the target's own first layers under its own head."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    drafter = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    drafter.load_state_dict(target.state_dict(), strict=False)
    return drafter.eval()


class ScriptedDrafter(TreeCandidateGenerator):
    """Random trees around a known continuation: scattered paths of every length are accepted.

    Each node of the script gets decoy siblings before and after it, and decoys get children, among them the script's
    next token, so that cousins share tokens.

    Args:
        script: `[S]` token ids, the sequence the target is going to produce, prompt included.
        hit_rate: the probability that a further token of the script is in the tree.
        seed: of the trees.
        tapped_states: to make the loop hand over hidden states, which are kept in `context`.
    """

    def __init__(self, script: list[int], hit_rate: float = 0.8, seed: int = 0, tapped_states: tuple[int, ...] = ()):
        self.script, self.hit_rate, self.rng = script, hit_rate, random.Random(seed)
        self.tapped_states = tapped_states
        self.context = []

    def prefill(self, hidden_states, position_ids):
        self.context.append(hidden_states)

    def commit_path(self, path, hidden_states):
        self.context.append(hidden_states)

    def get_candidates(self, input_ids, tree_budget, max_depth):
        position = input_ids.shape[1]
        token_ids, parents = [int(input_ids[0, -1])], [-1]
        level, on_script = [0], 0
        for depth in range(max_depth):
            if len(token_ids) > tree_budget or position + depth >= len(self.script):
                break
            follow = on_script is not None and self.rng.random() < self.hit_rate
            next_token = self.script[position + depth]
            edges = self._edges(level, on_script if follow else None, next_token)
            edges = edges[: tree_budget + 1 - len(token_ids)]
            first = len(token_ids)
            token_ids += [token for _, token in edges]
            parents += [parent for parent, _ in edges]
            on_script = first + edges.index((on_script, next_token)) if (on_script, next_token) in edges else None
            level = list(range(first, len(token_ids)))
        return DraftTree.from_lists(token_ids, parents)

    def _edges(self, level, on_script, next_token):
        edges = set()
        for node in self.rng.sample(level, min(2, len(level))):
            edges |= {(node, self.rng.randrange(VOCAB_SIZE)) for _ in range(2)}
            edges.add((node, next_token))  # a cousin of the script's node, unless it is that node
        if on_script is None:
            return sorted(edges, key=lambda _: self.rng.random())
        return sorted(edges | {(on_script, next_token)}, key=lambda _: self.rng.random())
