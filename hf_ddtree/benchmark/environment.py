"""What the figures of a run depend on: model, machine and versions."""

import platform
from typing import Any

import accelerate
import torch
import transformers
from accelerate import PartialState
from transformers import PreTrainedModel

import hf_ddtree

from .._transformers import attention_implementation
from ..target.timing import cpu_name


def environment(target: PreTrainedModel, state: PartialState) -> dict[str, Any]:
    """Return the columns that every row of a run shares.

    Args:
        target: the target on its device.
        state: the processes of this run.
    """
    on_gpu = target.device.type == "cuda"
    return {
        "model": target.config.name_or_path,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": attention_implementation(target.config),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "processes": state.num_processes,
        "python": platform.python_version(),
        "hf_ddtree": hf_ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
