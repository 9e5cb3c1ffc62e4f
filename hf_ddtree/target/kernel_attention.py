"""The Triton kernel as attention backend, and the choice between it and PyTorch's attention."""

import inspect
from collections.abc import Callable, Hashable
from functools import cached_property
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from transformers import Cache, PreTrainedModel

from .._transformers import attention_functions, attention_implementation, uses_attention_interface
from .attention import MaskedForward, TreeForward, call_attend, text_config
from .masks import Masks, first_valid, layer_window, no_masks
from .patching import Patch

T = TypeVar("T")


class KernelForward(TreeForward):
    """Attends by the Triton kernel, which gets the ancestor relation as bits and needs no mask."""

    name = "triton"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._shared: dict[Hashable, Any] = {}  # tensors that several layers use

    @classmethod
    def patches(cls, model: PreTrainedModel) -> list[Patch]:
        """Return the patches under which the layers of `model` call `attend`."""
        if attention_implementation(text_config(model)) == "sdpa":
            return [Patch(attention_functions(), "sdpa", call_attend)]
        files = [inspect.unwrap(type(module).forward).__globals__ for module in model.modules()]
        eager = {id(names): names for names in files if "eager_attention_forward" in names}
        return [Patch(names, "eager_attention_forward", call_attend) for names in eager.values()]

    def masks(self, cache: Cache, device: torch.device) -> Masks:
        """Return empty masks, because the kernel needs none."""
        return no_masks(self.config, device)

    def attend(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        softcap=None,
        s_aux=None,
        position_bias=None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Attend in one layer. The layer's window comes from the config, by the layer's index."""
        from ..kernels.tree_attention import tree_attention  # needs Triton

        if position_bias is not None:
            raise NotImplementedError("the kernel adds no position bias")
        device, n_prefix = query.device, key.shape[2] - query.shape[2]
        ancestors, depths = self._once(("tree", device), lambda: self._tree_tensors(device))
        prefix, first_valid = self._once(("prefix", device, n_prefix), lambda: self._prefix_tensors(n_prefix, device))
        output = tree_attention(
            query,
            key,
            value,
            ancestors,
            depths,
            prefix,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            first_valid=first_valid,
            window=layer_window(self.config, module.layer_idx),
            softcap=softcap,
            sinks=s_aux,
        )
        return output.transpose(1, 2).contiguous(), None

    def _tree_tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ancestor bits and the depths."""
        from ..kernels.reference import pack_ancestors

        ancestors = pack_ancestors(self.tree.ancestor_mask[None])
        return ancestors.to(device), self.tree.depths[None].to(device, torch.int32)

    def _prefix_tensors(self, n_prefix: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the number of prefix keys, and the index of the first one that is no padding (None: all are valid)."""
        # a sliding layer has dropped the first L - P tokens
        first_valid = max(0, self._n_padding - (self.length - n_prefix))
        prefix, first = torch.tensor([[n_prefix], [first_valid]], dtype=torch.int32, device=device)
        return prefix, first if first_valid else None

    @cached_property
    def _n_padding(self) -> int:
        """The number of padding tokens at the left of the prefix."""
        return 0 if self.padding_mask is None else first_valid(self.padding_mask[0])

    def _once(self, name: Hashable, make: Callable[[], T]) -> T:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]


def choose_attention(
    model: PreTrainedModel, name: str, device: torch.device, attention_mask: torch.Tensor | None, path_by_path: bool
) -> type[TreeForward]:
    """Return the attention backend of a call. "auto" takes the kernel on a GPU if nothing prevents it.

    Args:
        model: the target.
        name: "auto", "sdpa" or "triton"; "triton" must have passed `checks.check_attention`.
        device: where the inputs are.
        attention_mask: `[1, S]`, the padding mask of the prompt, or None.
        path_by_path: whether trees of this model are verified path by path.
    """
    if name == "auto":
        problem = kernel_problem(model, device, attention_mask, path_by_path)
        name = "triton" if problem is None and on_gpu(model, device) else "sdpa"
    return {"sdpa": MaskedForward, "triton": KernelForward}[name]


def kernel_problem(
    model: PreTrainedModel, device: torch.device, attention_mask: torch.Tensor | None, path_by_path: bool
) -> str | None:
    """Return why the kernel cannot verify trees for this call, or None.

    Args:
        model: the target.
        device: where the inputs are.
        attention_mask: `[1, S]`, the padding mask of the prompt, or None.
        path_by_path: whether trees of this model are verified path by path.
    """
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton; it does not exist for macOS)"
    if not on_gpu(model, device) and not _interpreted():
        return "the kernel runs on CUDA and ROCm devices, or very slowly on a CPU with TRITON_INTERPRET=1"
    if path_by_path:
        return f"{type(model).__name__} is verified path by path"
    if not uses_attention_interface(model):
        return f"transformers does not say that {type(model).__name__} attends through its AttentionInterface"
    if attention_mask is not None and not torch.equal(attention_mask.bool(), attention_mask.bool().cummax(-1).values):
        return "attention_mask hides tokens other than padding at the left"
    return None


def on_gpu(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether every layer runs on a GPU. Offloaded weights are "meta" and move to the inputs' device later."""
    return device.type == "cuda" and {parameter.device.type for parameter in model.parameters()} <= {"cuda", "meta"}


def _interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret
