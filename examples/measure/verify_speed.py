"""What verifying a tree costs a whole model, by number of nodes. attention_speed.py runs it."""

from collections.abc import Callable
from typing import Any

import torch
from timers import median_milliseconds
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ddtree import DraftTree
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.kernel_attention import KernelForward
from hf_ddtree.target.target import Target

MODELS = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    },
}
BRANCHING = 3  # children per node: about as wide as good drafters make their trees at budget 64


@torch.inference_mode()
def verify_times(
    name: str, length: int, nodes: list[int], device: torch.device, dtype: torch.dtype, use_kernel: bool, repeats: int
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the times of verifying trees, by attention backend.

    Args:
        name: a key of `MODELS`. The weights are random.
        length: the number of committed tokens.
        nodes: numbers of nodes, the root included.
        device: where the model runs.
        dtype: the dtype of the model.
        use_kernel: whether to time the Triton kernel, too.
        repeats: the verifications of each tree that count.

    Returns:
        For each backend "ms", the median milliseconds by number of nodes, and "relative", the same as multiples of the
        first number of nodes.
    """
    config = AutoConfig.for_model("llama", **MODELS[name])
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    found = {}
    for attention in (MaskedForward, KernelForward) if use_kernel else (MaskedForward,):
        prompt = torch.randint(config.vocab_size, (length,), device=device)
        target = Target.after(model, prompt, attention)
        with target.decoding():
            verifications = {n_nodes: verification(target, n_nodes) for n_nodes in nodes}
            ms = median_milliseconds(verifications, device, repeats)
        found[attention.name] = {"ms": ms, "relative": {n_nodes: ms[n_nodes] / ms[nodes[0]] for n_nodes in nodes}}
    return found


def verification(target: Target, n_nodes: int) -> Callable[[], Any]:
    """Return a function that verifies a wide tree and then drops all of its nodes, so that calls do not add up.

    Args:
        target: the target, inside `decoding`.
        n_nodes: the number of nodes, the root included.
    """

    def verify_and_drop() -> None:
        target.verify([wide_tree(n_nodes)])
        target.cache.crop(-n_nodes)

    return verify_and_drop


def wide_tree(n_nodes: int) -> DraftTree:
    """Return a tree in which every node has up to `BRANCHING` children.

    Args:
        n_nodes: the number of nodes, the root included.
    """
    return DraftTree.from_lists([0] * n_nodes, [-1, *((node - 1) // BRANCHING for node in range(1, n_nodes))])
