"""Gated DeltaNet layers over a tree: all nodes in one forward, and a commit that runs no token again.

A head of such a layer carries a state S, `[K, V]`. A token with query q, key k, value v, decay a = exp(g) and write
strength b turns it into

    S_i = a_i S_{i-1} + k_i u_i^T    with    u_i = b_i (v_i - a_i S_{i-1}^T k_i),    and reads    o_i = S_i^T q_i.

Over a tree, i - 1 is the parent of i. Let S_0 be the committed state, A_i the product of a along the path to i, itself
included, and j < i mean that j is a proper ancestor of i. Unrolled along the path,

    S_i = A_i S_0 + sum_{j <= i} (A_i / A_j) k_j u_j^T,

and inserting S_{i-1} into u_i gives one linear equation per node:

    u_i + sum_{j < i} b_i (A_i / A_j) (k_i . k_j) u_j = b_i (v_i - A_i S_0^T k_i).

Parents precede their children, so the system is unit lower triangular, and one triangular solve serves the whole tree.
For a chain this is the chunk rule of Yang et al. (arXiv 2412.06464). When a path that ends in node l is committed, the
formula for S_l gives the new state from values that the forward has computed already.

The short convolution before the rule sees, for each node, the inputs of its nearest ancestors.
"""

import sys

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..tree import DraftTree
from .patching import Patch

# model types whose modelling files call the functions below by these names
MODULES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"))
EPS = 1e-6  # of the key and query normalisation, as in these files


class TreeStates:
    """A tree on its way through the Gated DeltaNet layers of a forward, and what each layer needs for the commit.

    Args:
        tree: N nodes.
    """

    def __init__(self, tree: DraftTree):
        self.parents = tree.parents
        self.ancestor_mask = tree.ancestor_mask
        self.updates: list[tuple[torch.Tensor, ...]] = []  # per layer: keys, u, log A, S_0

    def convolve(self, states, weight, bias=None, activation=None, **kwargs) -> torch.Tensor:
        """Return the causal depthwise convolution along each node's own path, `[B, C, N]`.

        Args:
            states: `[B, C, S + N]`, the cached inputs of the last S committed tokens and those of the nodes.
            weight: `[C, width]`, width <= S + 1.
            bias: `[C]` or None.
            activation: the name of an activation function, or None.
            kwargs: further arguments of the original function, which a tree forward does not need.
        """
        width = weight.shape[-1]
        columns = self._windows(states.shape[-1], width).to(states.device)
        # one column of the window at a time, because all at once would take `width` times the memory
        output = sum(states[..., columns[:, i]].float() * weight[:, i, None].float() for i in range(width))
        if bias is not None:
            output = output + bias[:, None].float()
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.to(states.dtype)

    def _windows(self, n_columns: int, width: int) -> torch.Tensor:
        """Return the columns that the convolution at each node sees, the node's own last: `[N, width]`."""
        before = n_columns - len(self.parents)
        previous = torch.arange(-1, n_columns - 1, dtype=torch.long, device=self.parents.device)
        previous[before + 1 :] = before + self.parents[1:]
        windows = [torch.arange(before, n_columns, dtype=torch.long, device=self.parents.device)]
        for _ in range(width - 1):
            windows.insert(0, previous[windows[0]])
        return torch.stack(windows, dim=1)

    def delta_rule(
        self, query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel=False, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the gated delta rule in the module's docstring, computed in float32.

        Args:
            query, key: `[B, N, key heads, K]`.
            value: `[B, N, value heads, V]`.
            g, beta: `[B, N, value heads]`, the log-decay and the write strength.
            initial_state: `[B, value heads, K, V]`, S_0.
            use_qk_l2norm_in_kernel: whether to normalise queries and keys.
            kwargs: further arguments of the original function, which a tree forward does not need.

        Returns:
            `[B, N, value heads, V]`, and S_0, because the node whose state will stay is not known yet.
        """
        dtype, group = query.dtype, value.shape[2] // key.shape[2]
        query, key, value, beta, g = (x.transpose(1, 2).float() for x in (query, key, value, beta, g))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (query, key))
        query, key = (x.repeat_interleave(group, dim=1) for x in (query / query.shape[-1] ** 0.5, key))
        state = initial_state.float()

        ancestors = self.ancestor_mask.to(query.device)
        log_a = g @ ancestors.T.float()  # along the path, itself included
        # for nodes that are no ancestors, the exponent may be positive and overflow
        decay = (log_a[..., :, None] - log_a[..., None, :]).masked_fill(~ancestors, -torch.inf).exp()
        from_state = log_a.exp()[..., None]
        system = beta[..., None] * decay * (key @ key.mT)
        known = beta[..., None] * (value - from_state * (key @ state))
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        output = from_state * (query @ state) + (decay * (query @ key.mT)) @ u
        self.updates.append((key, u, log_a, state))
        return output.transpose(1, 2).to(dtype), initial_state

    def commit(self, recurrent_states: list[torch.Tensor], path: list[int]) -> None:
        """Advance the states of all layers in place to the end of a path.

        Args:
            recurrent_states: per layer in the order of the forward, S_0 `[B, value heads, K, V]`.
            path: node indices from the root down.
        """
        for committed, (key, u, log_a, state) in zip(recurrent_states, self.updates, strict=True):
            rows = torch.tensor(path, dtype=torch.long, device=key.device)
            last = log_a[..., path[-1], None]
            weighted = key[..., rows, :] * (last - log_a[..., rows]).exp()[..., None]
            committed.copy_(last[..., None].exp() * state + weighted.mT @ u[..., rows, :])


def gated_delta_patches(model: PreTrainedModel) -> list[Patch]:
    """Return the patches for the files of `MODULES` that define layers of the model, [] without such layers.

    Args:
        model: the target.
    """
    modules = {type(module).__module__ for module in model.modules()}.intersection(MODULES)
    return [Patch(vars(sys.modules[name]), *replacement) for name in modules for replacement in REPLACEMENTS.items()]


def _convolve(forward, *args, **kwargs):
    return forward.states.convolve(*args, **kwargs)


def _delta_rule(forward, *args, **kwargs):
    return forward.states.delta_rule(*args, **kwargs)


REPLACEMENTS = {  # a function of these files: what is called instead
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,  # called for a tree of the root alone
}
