"""Loading a drafter from a directory or the Hub, without running any code of the checkpoint."""

from typing import Any

from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .dflash_model import DFlashDraftModel, check_block
from .speculators import SpeculatorsDFlashConfig, SpeculatorsDFlashModel


def load_drafter(path_or_repo_id: str, **kwargs) -> PreTrainedModel:
    """Load a drafter: choose its class by config.json, and load safetensors weights into it.

    Supported are DFlash drafters in the z-lab v1 layout and in the layout of the speculators library, transformers'
    `muse_glimmer_assistant`, and every causal LM of transformers.

    Args:
        path_or_repo_id: a directory or a Hub id.
        kwargs: passed on to `from_pretrained`, for example `dtype=torch.bfloat16`, `device_map="cuda"`,
            `revision="main"`.

    Returns:
        The drafter in evaluation mode, to be passed to `generate` as `assistant_model`.

    Raises:
        ValueError: for an unsupported layout, a missing field, or weights that do not fill the model exactly. The
            message names the field or the weights. Also for `trust_remote_code=True`.
        OSError: if there is no config, or if there are no safetensors weights.

    Example:
        >>> drafter = hf_ddtree.load_drafter("z-lab/Qwen3-4B-DFlash-b16", dtype=torch.bfloat16)
        >>> output = model.generate(**inputs, assistant_model=drafter, tree_budget=64)
    """
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code: load_drafter never runs code from a checkpoint; drop it.")
    hub_options = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
    fields, _ = PreTrainedConfig.get_config_dict(path_or_repo_id, **hub_options)
    model_class = _drafter_class(path_or_repo_id, fields)
    if model_class is SpeculatorsDFlashModel:
        kwargs["config"] = SpeculatorsDFlashConfig.from_fields(fields, path_or_repo_id)
    model, info = model_class.from_pretrained(
        path_or_repo_id,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, together with missing and unexpected weights
        **kwargs,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            names = sorted(str(key) for key in info[problem])
            raise ValueError(
                f"{path_or_repo_id}: {len(names)} {problem.replace('_', ' ')} for {model_class.__name__}, among them "
                f"{names[:4]}. The weights belong to another model or are incomplete; download the checkpoint again."
            )
    if model_class is SpeculatorsDFlashModel:
        model.check_vocabulary(path_or_repo_id)
    return model.eval()


def _drafter_class(name: str, fields: dict) -> Any:
    architecture = (fields.get("architectures") or ["(none)"])[0]
    model_type = fields.get("model_type")
    if "speculators_model_type" in fields:
        return SpeculatorsDFlashModel
    if architecture == "DFlashDraftModel":
        dflash = fields.get("dflash_config") or {}
        block_size = fields.get("block_size", dflash.get("block_size"))
        layers = dflash.get("target_layer_ids") or fields.get("num_target_layers")
        check_block(block_size, dflash.get("mask_token_id"), layers, name)
        return DFlashDraftModel
    if model_type == "muse_glimmer_assistant":
        return MuseGlimmerAssistantModel
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return AutoModelForCausalLM
    raise ValueError(
        f"{name}: hf_ddtree cannot load architecture {architecture!r} (model_type {model_type!r}) as a drafter. Choose "
        "DFlash in the layout of z-lab (v1) or speculators, muse_glimmer_assistant, or a causal LM of transformers."
    )
