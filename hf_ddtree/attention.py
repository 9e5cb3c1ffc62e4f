"""Attention over a tree inside the models' own attention layers: what the keyword `ddtree` does there."""

import inspect
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .dispatch import TreeFunction
from .gated_delta import TreeStates
from .tree import DraftTree

BACKENDS = ("auto", "sdpa", "triton")


class TreeForward:
    """A tree on its way through a target forward: the value of the keyword `ddtree`.

    Args:
        tree: N nodes.
        length: L, the committed tokens.
        padding: how many of them, at the left, are padding. Only the kernel asks.
        use_kernel: attend by the Triton kernel, under masks from `window_masks`; otherwise under those from
            `tree_attention_mask`.
        states: for Gated DeltaNet layers, None without them.
    """

    def __init__(self, tree: DraftTree, length: int, padding: int, use_kernel: bool, states: TreeStates | None):
        self.tree, self.length, self.padding, self.use_kernel, self.states = tree, length, padding, use_kernel, states
        self._shared: dict = {}  # what all layers of a kind need

    def attend(
        self, module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """The attention function of a layer, in the form of transformers' `AttentionInterface`.

        Args:
            query: `[1, Hq, N, D]`.
            key, value: `[1, Hkv, P + N, D]`, the prefix the layer keeps and the nodes.
            attention_mask: `[1, 1, N, P + N]` for PyTorch, additive; `[1, 1, 0, window or 0]` for the kernel.
            scaling, softcap, s_aux: the layer's scale, soft cap and sinks.
            position_bias: the layer's own addition to the mask, `[1, Hq, N, P + N]`.

        Returns:
            `[1, N, Hq, Dv]`, and None for the weights.
        """
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.use_kernel:
            if position_bias is not None:
                raise NotImplementedError("the kernel adds no position bias")
            output = self._kernel(query, key, value, attention_mask.shape[-1] or None, scaling, softcap, s_aux)
        elif query.is_cuda or position_bias is not None:  # under a mask CUDA has no fast attention for grouped heads
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias
            )
        else:
            output = grouped_attention(query, key, value, attention_mask, scaling)
        return output.transpose(1, 2).contiguous(), None

    def _kernel(self, query, key, value, window, scaling, softcap, sinks) -> torch.Tensor:
        from .kernels.tree_attention import tree_attention  # needs Triton

        device, n_prefix = query.device, key.shape[2] - query.shape[2]
        ancestors, depths = self._once(("tree", device), lambda: self._tree_tensors(device))
        # a sliding layer has dropped the first L - P tokens
        first_valid = max(0, self.padding - (self.length - n_prefix))
        prefix, first = self._once(
            ("prefix", device, n_prefix),
            lambda: torch.tensor([[n_prefix], [first_valid]], dtype=torch.int32, device=device),
        )
        return tree_attention(
            query,
            key,
            value,
            ancestors,
            depths,
            prefix,
            scaling,
            first_valid=first if first_valid else None,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def _tree_tensors(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        from .kernels.reference import pack_ancestors

        ancestors = pack_ancestors(self.tree.ancestor_mask[None])
        return ancestors.to(device), self.tree.depths[None].to(device, torch.int32)

    def _once(self, name, make):
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]


def grouped_attention(query, key, value, mask, scaling: float) -> torch.Tensor:
    """`[B, Hq, N, Dv]`, without a copy of each key and value for every query head of its group."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


def attention_functions(model: PreTrainedModel, use_kernel: bool) -> list[TreeFunction]:
    """What the layers of `model` call to attend, to be replaced in a tree forward.

    transformers' eager functions, which some families need for soft caps and sinks, stay with their masks unless the
    kernel takes over.
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if not model._supports_attention_backend:  # its layers attend by code of their own
        return []
    if implementation == "sdpa":
        return [TreeFunction(AttentionInterface._global_mapping, "sdpa", TreeForward.attend)]
    if not use_kernel:
        return []
    files = [inspect.unwrap(type(module).forward).__globals__ for module in model.modules()]
    eager = {id(names): names for names in files if "eager_attention_forward" in names}
    return [TreeFunction(names, "eager_attention_forward", TreeForward.attend) for names in eager.values()]


def choose_kernel(
    model: PreTrainedModel, backend: str, device: torch.device, model_kwargs: dict, path_by_path: bool
) -> bool:
    """Whether the Triton kernel attends: "auto" where it can and the device is a GPU.

    Args:
        backend: `tree_attention` of the request.
        device: where the inputs are.
        model_kwargs: `generate`'s keyword arguments for the forward.
        path_by_path: the trees of this model are verified path by path.

    Raises:
        ValueError: if "triton" was asked for and cannot run.
    """
    on_gpu = _on_gpu(model, device)
    problem = _kernel_problem(model, on_gpu, model_kwargs, path_by_path)
    if backend == "triton" and problem is not None:
        raise ValueError(f'tree_attention="triton": {problem}; use "auto" or "sdpa".')
    return backend == "triton" or (backend == "auto" and problem is None and on_gpu)


def _kernel_problem(model, on_gpu: bool, model_kwargs: dict, path_by_path: bool) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton; there is none for macOS)"
    if not on_gpu and not _interpreted():
        return "the kernel runs on CUDA and ROCm devices, or very slowly on a CPU where TRITON_INTERPRET=1 is set"
    if path_by_path:
        return f"{type(model).__name__} is verified path by path"
    if not model._supports_attention_backend:
        return f"transformers does not vouch for the attention of {type(model).__name__} going through its interface"
    mask = model_kwargs["attention_mask"]
    if mask is not None and not torch.equal(mask.bool(), mask.bool().cummax(dim=-1).values):
        return "attention_mask hides tokens other than padding at the left"
    return None


def _on_gpu(model, device: torch.device) -> bool:
    """Whether every layer runs on a GPU; offloaded weights are "meta" until then, and go where the inputs are."""
    return device.type == "cuda" and {parameter.device.type for parameter in model.parameters()} <= {"cuda", "meta"}


def _interpreted() -> bool:
    import triton

    return triton.knobs.runtime.interpret
