"""Loading a drafter from a directory or the Hub, without running any code of the checkpoint."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..messages import quoted
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
        ValueError: if `path_or_repo_id` is no name, for an unsupported layout, a missing field, or weights that do not
            fill the model exactly. The message names the field or the weights. Also for `trust_remote_code=True`, and
            for a quantised DFlash drafter.
        OSError: if there is no folder or Hub id of this name, no readable config.json, or no readable safetensors
            weights.

    Example:
        >>> drafter = hf_ddtree.load_drafter("z-lab/Qwen3-4B-DFlash-b16", dtype=torch.bfloat16)
        >>> output = model.generate(**inputs, assistant_model=drafter, tree_budget=64)
    """
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code: load_drafter never runs code from a checkpoint; drop it.")
    fields = _read_config(path_or_repo_id, kwargs)
    model_class = _drafter_class(path_or_repo_id, fields)
    if model_class is not AutoModelForCausalLM:
        _refuse_quantisation(path_or_repo_id, fields, kwargs)
    if model_class is SpeculatorsDFlashModel:
        kwargs["config"] = SpeculatorsDFlashConfig.from_fields(fields, path_or_repo_id)
    with _named_errors(path_or_repo_id, "model.safetensors"):
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


def _read_config(path_or_repo_id: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json, and raise an error with the argument's name if there is none."""
    if not isinstance(path_or_repo_id, (str, os.PathLike)) or not str(path_or_repo_id):
        kind = "an empty name" if path_or_repo_id == "" else f"a {type(path_or_repo_id).__name__}"
        raise ValueError(
            f"path_or_repo_id: load_drafter takes a folder or a Hub id, not {kind}. If it is a model, pass it to "
            "generate as assistant_model."
        )
    path, text = Path(path_or_repo_id), str(path_or_repo_id)
    is_local = text.startswith(("/", ".", "~")) or text.count("/") > 1  # no Hub id looks like this
    if path.is_file() or (is_local and not path.is_dir()):
        problem = "a file" if path.is_file() else "no folder"
        raise OSError(
            f"path_or_repo_id: '{path_or_repo_id}' is {problem}; pass the folder that holds config.json and "
            "model.safetensors, or a Hub id."
        )
    if path.is_dir() and not (path / kwargs.get("subfolder", "") / "config.json").is_file():
        raise OSError(
            f"path_or_repo_id: the folder '{path_or_repo_id}' holds no config.json; pass the folder of a drafter as "
            "save_pretrained writes it."
        )
    hub_options = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    with _named_errors(path_or_repo_id, "config.json"):
        fields, _ = PreTrainedConfig.get_config_dict(
            path_or_repo_id, **{name: kwargs[name] for name in hub_options if name in kwargs}
        )
    if not isinstance(fields, dict):
        raise OSError(f"path_or_repo_id: config.json of '{path_or_repo_id}' holds no object; download it again.")
    return fields


@contextmanager
def _named_errors(path_or_repo_id: str, name: str) -> Iterator[None]:
    """Turn errors of the Hub and of damaged files into an OSError that names the argument. The cause keeps them."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = f"{name} of '{path_or_repo_id}' cannot be read; download the drafter again"
        if not os.path.isdir(path_or_repo_id):
            problem = (
                f"there is no folder '{path_or_repo_id}', and the Hub gave no {name} for this id; check the spelling, "
                "the connection, and the token of a private or gated drafter"
            )
        raise OSError(f"path_or_repo_id: {problem}.") from error


def _refuse_quantisation(name: str, fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    if fields.get("quantization_config") is not None or kwargs.get("quantization_config") is not None:
        where = "its config.json has" if kwargs.get("quantization_config") is None else "you passed"
        raise ValueError(
            f"quantization_config: {name} is a DFlash drafter, which cannot be quantised, and {where} this field; load "
            "the drafter in bfloat16."
        )


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
        f"{name}: hf_ddtree cannot load architecture {quoted(architecture)} (model_type {quoted(model_type)}) as a "
        "drafter. Choose DFlash in the layout of z-lab (v1) or speculators, muse_glimmer_assistant, or a causal LM of "
        "transformers."
    )
