"""Loading a drafter from a directory or the Hub, without ever running its code."""

from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .dflash_model import DFlashDraftModel, check_block
from .speculators import SpeculatorsDFlashConfig, SpeculatorsDFlashModel


def load_drafter(path_or_repo_id: str, **kwargs) -> PreTrainedModel:
    """Read config.json, pick the class it stands for, and load safetensors weights into it.

    Supported: DFlash drafters in the z-lab v1 layout and in that of the speculators library, transformers'
    `muse_glimmer_assistant`, and any causal LM transformers knows.

    Args:
        path_or_repo_id: a directory or a Hub id.
        kwargs: passed on to `from_pretrained`, e.g. `dtype=torch.bfloat16`, `device_map="cuda"`, `revision=...`.

    Returns:
        The drafter in evaluation mode, for `generate` as `assistant_model`.

    Raises:
        ValueError: for a layout that is not supported, a field that is missing, or weights that do not fill the model
            exactly, naming the field or the weights; and for `trust_remote_code=True`.
        OSError: if there is no config, or no safetensors weights.
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
        ignore_mismatched_sizes=True,  # reported below, with the other misfits
        **kwargs,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            names = sorted(str(key) for key in info[problem])
            raise ValueError(
                f"{path_or_repo_id}: {len(names)} {problem.replace('_', ' ')} for {model_class.__name__}, among them "
                f"{names[:4]}. The weights are of another model or incomplete."
            )
    if model_class is SpeculatorsDFlashModel:
        model.check_vocabulary(path_or_repo_id)
    return model.eval()


def _drafter_class(name: str, fields: dict) -> type:
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
        f"{name}: architecture {architecture!r} (model_type {model_type!r}) is no drafter hf_ddtree can load. Supported: "
        "DFlash in the layouts of z-lab (v1) and of speculators, muse_glimmer_assistant, and transformers' causal LMs."
    )
