"""Target forwards: prefill of the prompt, verification of a tree, and what the accepted path leaves in the cache."""

import copy
from contextlib import contextmanager
from threading import get_ident

import torch
from transformers import Cache
from transformers.utils import ModelOutput

from .attention import TreeForward, attention_functions
from .cache import Committed, commit_path, is_recurrent, uncommitted_rows
from .dispatch import TreeFunction, tree_functions
from .gated_delta import TreeStates, gated_delta_functions
from .masks import tree_attention_mask, window_masks
from .tree import DraftTree

MAX_PATHS = 16  # root-to-leaf paths in one forward; each has a copy of the cache


def prefill(model, input_ids, generation_config, model_kwargs, tapped_states: tuple[int, ...]):
    """Run the prompt through the target as plain `generate` does, in chunks if asked for.

    Args:
        model: the target.
        input_ids: `[1, S]` int64.
        generation_config: the request's; `prefill_chunk_size` is honoured.
        model_kwargs: `generate`'s keyword arguments for the forward; updated for the first new token.
        tapped_states: the hidden states the drafter reads, as indices into `outputs.hidden_states`.

    Returns:
        The outputs of the last chunk, and the drafter's context: the tapped states `[1, P, taps * H]` and positions
        `[1, P]` of ALL prompt tokens that ran, padding excluded; empty without taps.
    """
    captured = []
    thread = get_ident()

    def capture(module, args, outputs):
        if get_ident() == thread:  # other threads may be generating with the same model
            captured.append(tap(outputs, tapped_states))

    request = model_kwargs
    if tapped_states:
        # an index list keeps only those states; a user who asked for all of them gets all
        request = {"output_hidden_states": list(tapped_states), **model_kwargs}
    # a hook, because chunked prefill returns the last chunk's outputs only
    handle = model.register_forward_hook(capture)
    try:
        outputs = model._prefill(input_ids, generation_config, request)
    finally:
        handle.remove()
    states = torch.cat(captured, dim=1)
    n = states.shape[1]
    positions = text_positions(model_kwargs["position_ids"])[:, -n:]
    if tapped_states and model_kwargs["attention_mask"] is not None:
        valid = model_kwargs["attention_mask"][0, -n:].bool()
        states, positions = states[:, valid.to(states.device)], positions[:, valid]
    return outputs, (states, positions)


def is_path_by_path(model, cache: Cache) -> bool:
    """Whether layers carry a state for which there is no tree form."""
    return any(map(is_recurrent, cache.layers)) and not gated_delta_functions(model)


@contextmanager
def tree_verifier(model, cache: Cache, use_kernel: bool, tapped_states: tuple[int, ...] = ()):
    """How trees are verified on this model and cache, for the length of a generation.

    Yields a `TreeVerifier`, or a `PathVerifier` where layers carry a state for which there is no tree form.

    Args:
        model: the target.
        cache: its cache after the prefill.
        use_kernel: attend by the Triton kernel.
        tapped_states: indices into `outputs.hidden_states` that the drafter reads.
    """
    if is_path_by_path(model, cache):
        yield PathVerifier(model, cache, tapped_states)
        return
    with uncommitted_rows(cache) as committed:
        yield TreeVerifier(model, cache, use_kernel, tapped_states, committed)


class TreeVerifier:
    """Verifies a tree in one target forward, and commits a path by keeping its rows of the cache.

    Args:
        use_kernel: attend by the Triton kernel, which needs no mask.
        committed: says how many tokens of the cache are final.
    """

    def __init__(self, model, cache: Cache, use_kernel: bool, tapped_states: tuple[int, ...], committed: Committed):
        self.model, self.cache, self.tapped_states = model, cache, tapped_states
        self.use_kernel, self.committed = use_kernel, committed
        self.recurrent = gated_delta_functions(model)
        self.functions: list[TreeFunction] = attention_functions(model, use_kernel) + self.recurrent
        self.forward: TreeForward | None = None

    def verify_tree(self, tree: DraftTree, model_kwargs: dict) -> ModelOutput:
        """One target forward over all nodes: logits `[1, N, V]`, where row i continues the prefix that ends in node i.

        The node at depth d stands at position (root's position) + d and sees the prefix, its ancestors and itself.

        Args:
            tree: N nodes, the root included: the last emitted token is not in the cache yet.
            model_kwargs: `generate`'s keyword arguments, whose `position_ids` and `attention_mask` end with the root and
                whose `cache` ends before it.
        """
        padding_mask, root = model_kwargs["attention_mask"], model_kwargs["position_ids"][..., -1:]
        depths = tree.depths.to(root.device)
        inputs = {
            **model_kwargs,
            "position_ids": root + depths,
            "attention_mask": self._mask(tree, depths, padding_mask),
        }
        inputs = _inputs(self.model, tree.token_ids[None].to(root.device), inputs, len(tree), self.tapped_states)
        padding = 0 if padding_mask is None or not self.use_kernel else int(padding_mask[0].argmax())
        states = TreeStates(tree) if self.recurrent else None
        self.forward = TreeForward(tree, self.committed.length, padding, self.use_kernel, states)
        if self.functions:
            inputs["ddtree"] = self.forward
        with tree_functions(self.functions):
            return self.model(**inputs, return_dict=True)

    def _mask(self, tree: DraftTree, depths: torch.Tensor, padding_mask: torch.Tensor | None):
        config = self.model.config.get_text_config(decoder=True)
        if self.use_kernel:
            return window_masks(config, depths.device)
        if len(tree) == 1:  # plain decoding: what the model makes of the padding mask is right, and takes less time
            return padding_mask
        return tree_attention_mask(
            config,
            self.cache,
            depths,
            depths,
            tree.ancestor_mask,
            padding_mask=padding_mask,
            dtype=self.model.dtype,
            device=depths.device,
        )

    def commit_path(self, path: list[int]) -> None:
        """Keep the rows of `path`, node indices from the root down, and forget the other nodes of the tree."""
        commit_path(self.cache, path, len(self.forward.tree))
        if self.recurrent:
            recurrent_states = [layer.recurrent_states[0] for layer in self.cache.layers if is_recurrent(layer)]
            self.forward.states.commit(recurrent_states, path)
        self.committed.length += len(path)


class PathVerifier:
    """Verifies every root-to-leaf path as a sequence of its own, and commits a path by running it once more.

    For layers whose state of one token cannot be taken back. The tokens near the root run once per leaf below them and
    every path needs a copy of the cache, but any model that continues a cached text can be verified like this.
    """

    def __init__(self, model, cache: Cache, tapped_states: tuple[int, ...]):
        self.model, self.cache, self.tapped_states = model, cache, tapped_states
        self.tree: DraftTree | None = None
        self.model_kwargs: dict = {}

    def verify_tree(self, tree: DraftTree, model_kwargs: dict) -> ModelOutput:
        """As `TreeVerifier.verify_tree`."""
        self.tree, self.model_kwargs = tree, model_kwargs
        parents = tree.parents.tolist()
        leaves = sorted(set(range(len(tree))) - set(parents))
        forwards, place, n_places = [], [0] * len(tree), 0
        for start in range(0, len(leaves), MAX_PATHS):
            paths = [path_to(leaf, parents) for leaf in leaves[start : start + MAX_PATHS]]
            branches = copy.deepcopy(self.cache)
            branches.reorder_cache(
                torch.zeros(len(paths), dtype=torch.long, device=model_kwargs["position_ids"].device)
            )
            outputs = self._forward(paths, branches, self.tapped_states)
            width = outputs.logits.shape[1]
            for row, path in enumerate(paths):
                for depth, node in enumerate(path):  # on several paths, with the same result
                    place[node] = n_places + row * width + depth
            n_places += len(paths) * width
            forwards.append(outputs)

        def of_nodes(states: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([state.flatten(0, 1) for state in states])[place][None]

        outputs.logits = of_nodes([forward.logits for forward in forwards])
        if outputs.get("hidden_states") is not None:
            layers = zip(*(forward.hidden_states for forward in forwards))
            outputs.hidden_states = tuple(None if states[0] is None else of_nodes(states) for states in layers)
        outputs.cache = self.cache
        return outputs

    def commit_path(self, path: list[int]) -> None:
        """As `TreeVerifier.commit_path`, by a forward over the path."""
        self._forward([path], self.cache)

    def _forward(self, paths: list[list[int]], cache: Cache, tapped_states: tuple[int, ...] = ()) -> ModelOutput:
        """A causal forward over some paths of the tree, `[len(paths), longest path]`, padded at the right."""
        n = max(map(len, paths))
        position_ids, mask = self.model_kwargs["position_ids"], self.model_kwargs["attention_mask"]
        rows = torch.tensor([path + [0] * (n - len(path)) for path in paths])
        positions = position_ids[..., -1:] + torch.arange(n, device=position_ids.device)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, n - 1), value=1).expand(len(paths), -1)
        inputs = {
            **self.model_kwargs,
            "cache": cache,
            "position_ids": positions.expand(*positions.shape[:-2], len(paths), n),
            "attention_mask": mask,
        }
        node_ids = self.tree.token_ids[rows].to(position_ids.device)
        return self.model(**_inputs(self.model, node_ids, inputs, n, tapped_states), return_dict=True)


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _inputs(model, node_ids: torch.Tensor, inputs: dict, n_logits: int, tapped_states: tuple[int, ...]) -> dict:
    """The forward's keyword arguments for more than the one token that `generate` prepares it for."""
    for name in ("token_type_ids", "mm_token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, -1:].expand_as(node_ids)
    if tapped_states:
        inputs.setdefault("output_hidden_states", list(tapped_states))
    inputs = model.prepare_inputs_for_generation(node_ids, is_first_iteration=False, **inputs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = n_logits
    return inputs


def tap(outputs: ModelOutput, tapped_states: tuple[int, ...], rows: list[int] | slice = slice(None)) -> torch.Tensor:
    """The tapped hidden states of some rows, side by side: `[1, len(rows), taps * H]`; empty without taps."""
    if not tapped_states:
        return outputs.logits.new_empty(1, 0, 0)
    if outputs.get("hidden_states") is None:
        raise ValueError("assistant_model: this drafter reads hidden states, which the target does not return.")
    states = [outputs.hidden_states[index] for index in tapped_states]
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)[:, rows]


def text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """`[1, S]`: the positions in the text, which come first where a model also has positions in images, `[rows, 1, S]`."""
    return position_ids if position_ids.dim() == 2 else position_ids[0]


def count_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
    """The number of padding tokens at the left of `input_ids`, whose mask is the end of `attention_mask`."""
    n = input_ids.shape[1]
    return 0 if attention_mask is None or n == 0 else int(attention_mask[0, -n:].argmax())


def deepest_node(model, room: int, position_ids: torch.Tensor) -> int:
    """How deep a node may lie: within the room that is left, and on a position the model has.

    Args:
        room: tokens the generation may still emit after the next one.
        position_ids: `[1, S]` or `[rows, 1, S]`, ending with the root's.
    """
    last_position = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    left = room if last_position is None else last_position - 1 - int(text_positions(position_ids)[0, -1])
    # plain generate only gets beyond the last position where positions are not learned
    return room if left < 0 else min(room, left)
