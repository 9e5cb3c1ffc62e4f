"""Small random models of every supported family."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from .families import ALL_FAMILIES, MULTIMODAL, OMITTED, SHAPE


def tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """Return a random fp32 model of a few thousand weights in evaluation mode, on the CPU.

    Args:
        family: a key of `ALL_FAMILIES`.
        seed: seeds the weights. The global random state stays as it is.
        overrides: config fields, and `attn_implementation`.
    """
    fields = {**SHAPE, **ALL_FAMILIES[family], **overrides}
    fields = {name: value for name, value in fields.items() if value != OMITTED}
    model_type = fields.pop("model_type", family)
    attn_implementation = fields.pop("attn_implementation", "sdpa")
    model_class = AutoModelForCausalLM
    if model_type in MULTIMODAL:
        model_class = AutoModelForImageTextToText
        fields = {**MULTIMODAL[model_type], "text_config": {**MULTIMODAL[model_type]["text_config"], **fields}}
    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32).eval()


def truncated_copy(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a causal-LM drafter: the target's first layers under its own head.

    Args:
        target: the target.
        num_layers: how many of its layers to keep.
    """
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    drafter = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    drafter.load_state_dict(target.state_dict(), strict=False)
    return drafter.eval()
