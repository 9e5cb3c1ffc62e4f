"""Attention over a tree inside the models' own attention layers: what the keyword `ddtree` does there."""

import sys
from importlib.util import find_spec

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dispatch import TreeFunction
from .gated_delta import TreeStates
from .tree import DraftTree

BACKENDS = ("auto", "sdpa", "triton")


class TreeForward:
    """A tree on its way through a target forward: the value of the keyword `ddtree`.

    Args:
        tree: N nodes.
        length: L, the committed tokens.
        padding: how many of them, at the left, are padding.
        use_kernel: attend by the Triton kernel, which needs no mask; otherwise under the masks the layers get.
        states: for Gated DeltaNet layers, None without them.
    """

    def __init__(self, tree: DraftTree, length: int, padding: int, use_kernel: bool, states: TreeStates | None):
        self.tree, self.length, self.padding, self.use_kernel, self.states = tree, length, padding, use_kernel, states
        self._cached: dict = {}  # what all layers of a kind share

    def attend(
        self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """The attention function of a layer, in the form of transformers' `AttentionInterface`.

        Args:
            query: `[1, Hq, N, D]`.
            key, value: `[1, Hkv, P + N, D]`, the prefix the layer keeps and the nodes.
            attention_mask: `[1, 1, N, P + N]`, additive; not read by the kernel.
            scaling, sliding_window, softcap, s_aux: the layer's.

        Returns:
            `[1, N, Hq, Dv]`, and None for the weights.
        """
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.use_kernel:
            output = self._kernel(query, key, value, scaling, sliding_window, softcap, s_aux)
        else:
            output = grouped_attention(query, key, value, self._mask(attention_mask, query, key), scaling)
        return output.transpose(1, 2).contiguous(), None

    def _kernel(self, query, key, value, scaling, window, softcap, sinks) -> torch.Tensor:
        from .kernels.tree_attention import tree_attention

        device, prefix = query.device, key.shape[2] - query.shape[2]
        ancestors, depths = self._once(("tree", device), lambda: self._tree_tensors(device))
        # a sliding layer has dropped the first L - P tokens
        first_valid = max(0, self.padding - (self.length - prefix))
        lengths = self._once(("prefix", device, prefix), lambda: _int32([prefix], device))
        first = self._once(("first", device, first_valid), lambda: _int32([first_valid], device)) if first_valid else None
        return tree_attention(
            query, key, value, ancestors, depths, lengths, scaling, first, window, softcap=softcap, sinks=sinks
        )

    def _tree_tensors(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        from .kernels.reference import pack_ancestors

        ancestors = pack_ancestors(self.tree.ancestor_mask[None])
        return ancestors.to(device), self.tree.depths[None].to(device, torch.int32)

    def _mask(self, mask, query, key) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return self._once(("mask", id(mask), group), lambda: mask.repeat(1, 1, group, 1))

    def _once(self, name, make):
        if name not in self._cached:
            self._cached[name] = make()
        return self._cached[name]


def grouped_attention(query, key, value, mask, scaling: float) -> torch.Tensor:
    """`[B, Hq, N, Dv]`, the query heads of a KV group packed into the query dimension, so that no key is copied.

    Args:
        mask: `[B, 1, group N, T]`, additive, repeated for the heads of a group.
    """
    n_batch, n_heads, n_nodes, _ = query.shape
    packed = query.reshape(n_batch, key.shape[1], -1, query.shape[-1])
    output = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(n_batch, n_heads, n_nodes, -1)


def _int32(values: list[int], device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def attention_functions(implementation: str, use_kernel: bool) -> list[TreeFunction]:
    """What the layers of a model with this attention implementation call in a tree forward.

    transformers' eager functions, which some families need for soft caps and sinks, stay with their masks unless the
    kernel takes over.
    """
    if implementation == "eager" and not use_kernel:
        return []
    return [TreeFunction(ALL_ATTENTION_FUNCTIONS, implementation, TreeForward.attend, default=_own_eager)]


def _own_eager(module, *args, **kwargs):
    """The eager function of the file a layer comes from."""
    for ancestor in type(module).__mro__:
        function = vars(sys.modules[ancestor.__module__]).get("eager_attention_forward")
        if function is not None:
            return function(module, *args, **kwargs)
    raise AttributeError(f"{type(module).__name__} has no eager attention function")


def check_backend(backend: str, device: torch.device) -> bool:
    """Whether to use the kernel on this device.

    Raises:
        ValueError: if "triton" was asked for and cannot run.
    """
    available = find_spec("triton") is not None
    if backend == "auto":
        return available and device.type == "cuda"
    if backend == "triton" and not available:
        raise ValueError('tree_attention="triton": Triton is not installed; pip install triton, or use "sdpa".')
    return backend == "triton"
