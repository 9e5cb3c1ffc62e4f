"""What a model's forward over a tree depends on, beside the values of its weights, in a form that can be compared."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .._transformers import attention_implementation
from .attention import TreeForward, text_config
from .gated_delta import REPLACEMENTS
from .patching import unpatched

# Where hooks come from that only record. transformers adds its own when hidden states are asked for the first time.
RECORDING_MODULES = ("hf_ddtree.", "transformers.utils.output_capturing")
# the functions in the files of the layers on which a forward over a tree depends
LAYER_FUNCTIONS = ("eager_attention_forward", *REPLACEMENTS)


class Snapshot:
    """What a tree forward depends on, at one moment. Two snapshots are equal if nothing of it changed.

    A snapshot covers the modules of the model, their training flags, hooks and replaced forwards, the dtypes and
    devices of their tensors, the functions that layers call by name, and autocast. Modules and functions are held
    weakly. A snapshot therefore keeps no model alive. After a function is deleted, its snapshot equals no later one.

    Args:
        model: the target.
        device: the device of its inputs.
        attention: the attention backend.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, attention: type[TreeForward]):
        implementation, modules = attention_implementation(text_config(model)), list(model.modules())
        # PyTorch has no public way to list hooks, and walking over `parameters()` takes several times as long.
        groups = [group for module in modules for group in (module._parameters, module._buffers) if group]
        tensors = [tensor for group in groups for tensor in group.values() if tensor is not None]
        self.values = [
            *(attention.name, implementation, device, _autocast("cpu"), _autocast(device.type)),
            *[module.training for module in modules],
            *[tensor.dtype for tensor in tensors],
            *[tensor.device for tensor in tensors],
        ]
        self.references: list[Any] = [weakref.ref(module) for module in modules]
        for module in modules:
            own_forward = vars(module).get("forward")  # accelerate wraps the forward of single modules
            if module._forward_pre_hooks or module._forward_hooks or own_forward is not None:
                self._add_calls(module, module._forward_pre_hooks, module._forward_hooks, own_forward)
        self._add_calls(None, torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks, None)
        for cls in dict.fromkeys(map(type, modules)):
            self._add_class(cls, implementation)
        self._add(ALL_MASK_ATTENTION_FUNCTIONS.get(implementation))

    def __eq__(self, other: object) -> bool:
        """Return whether nothing changed between two snapshots."""
        if not isinstance(other, Snapshot) or self.values != other.values:
            return False
        # by identity, because a hook may define its own `==`
        return len(self.references) == len(other.references) and all(map(is_, self.references, other.references))

    def _add_calls(self, module: torch.nn.Module | None, pre_hooks: Mapping, hooks: Mapping, forward: Any) -> None:
        """Add what happens in a call of a module beside the forward of its class."""
        calls = [*_changing(pre_hooks), None, *_changing(hooks), None, forward]
        if any(call is not None for call in calls):
            self._add(module, *calls)

    def _add_class(self, cls: type, implementation: str) -> None:
        """Add the forward of a class of layers, and the functions that the layers look up in their file."""
        forward = next(vars(ancestor)["forward"] for ancestor in cls.__mro__ if "forward" in vars(ancestor))
        names = getattr(inspect.unwrap(forward), "__globals__", {})
        self._add(forward, *[unpatched(names.get(name)) for name in LAYER_FUNCTIONS])
        interface = names.get("ALL_ATTENTION_FUNCTIONS")
        if interface is not None:
            self._add(unpatched(interface.get(implementation)))

    def _add(self, *items: Any) -> None:
        for item in items:
            try:  # weakref.ref returns the same object for as long as the item lives
                self.references.append(None if item is None else weakref.ref(item))
            except TypeError:  # few objects cannot be referenced weakly
                self.references.append(item)


def _changing(hooks: Mapping[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return the hooks that may change something."""
    copied = tuple(hooks.values())  # because another thread may register a hook meanwhile
    return [hook for hook in copied if not str(getattr(hook, "__module__", None)).startswith(RECORDING_MODULES)]


def _autocast(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
