"""Helpers that several test files share. pytest puts this folder on the path, so any test can import them."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_ddtree import DraftTree
from hf_ddtree.drafters.dflash import embed_without_norm
from hf_ddtree.testing import VOCAB_SIZE, ScriptedDrafter, char_tokenizer, tiny_dflash_drafter, tiny_model

__all__ = ["char_tokenizer"]  # other test files take it from here

ROOT = Path(__file__).parent.parent


def random_ids(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Return `[1, length]` random token ids without special tokens. The global random state stays as it is."""
    return torch.randint(4, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model, input_ids, seed: int = 0, **settings):
    """Call `model.generate` after seeding the global random state."""
    torch.manual_seed(seed)
    return model.generate(input_ids, **settings)


def scripted(sequence: torch.Tensor, hit_rate: float = 0.9, seed: int = 0, **options) -> ScriptedDrafter:
    """Return a drafter that knows the output `sequence`, `[1, S]`, so scattered paths of every length are accepted."""
    return ScriptedDrafter(sequence[0].tolist(), hit_rate, seed, **options)


def tree_arguments(drafter: str, model, sequence: torch.Tensor | None) -> dict:
    """Return the arguments of a tree request: `drafter` names the kind, and `sequence` is the expected output."""
    makers = {
        "scripted": lambda: scripted(sequence),
        "dflash": lambda: tiny_dflash_drafter(model),
        # the target itself: a drafter that is always right, so that deep paths are accepted
        "causal-lm": lambda: model,
        "look-up": lambda: None,
    }
    # with the policy "target", a seed gives the text that plain sampling gives
    return {"assistant_model": makers[drafter](), "tree_budget": 12, "tree_sampling": "target"}


def target_of(family: str):
    """Return a tiny target. At its last positions, the second kind of llama has rounds without a draft."""
    if family == "llama beyond its positions":
        return tiny_model("llama", max_position_embeddings=34)
    return tiny_model(family)


def prefixes(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return, for each drafted node, the tokens from the root's child down to it."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], int(tree.token_ids[node])))
    return paths[1:]


def spy_on(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, record: Callable) -> None:
    """Call `record(self, args, result)` after each call of a method."""
    original = getattr(cls, name)

    def wrapper(self, *args):
        result = original(self, *args)
        record(self, args, result)
        return result

    monkeypatch.setattr(cls, name, wrapper)


def draft_from_scratch(
    drafter, target, sequence: torch.Tensor, embed: Callable | None = None, head: Callable | None = None
) -> torch.Tensor:
    """Draft the block after `sequence` without a cache: one forward of the target and one of the DFlash model.

    The context is the tapped states of all tokens except the last one. The last token is the root and fills slot 0.
    Mask tokens fill the other slots.

    Args:
        drafter: the DFlash model.
        target: the target.
        sequence: `[1, S]` int64.
        embed: embeds the block. By default the target's embedding does.
        head: computes logits. By default the target's head does.

    Returns:
        `[block_size - 1, V]`, the logits of the tokens at depths 1 to block_size - 1.
    """
    config = drafter.config
    context = sequence[:, :-1]
    states = target(input_ids=context, output_hidden_states=True).hidden_states
    context_states = torch.cat([states[layer + 1] for layer in config.target_layer_ids], dim=-1)
    block = torch.tensor([[int(sequence[0, -1])] + [config.mask_token_id] * (config.block_size - 1)])
    embeds = embed(block) if embed else embed_without_norm(target.get_input_embeddings(), block)
    positions = torch.arange(context.shape[1] + config.block_size)[None]
    hidden = drafter(noise_embeds=embeds, context_hidden_states=context_states, position_ids=positions)
    return (head or target.get_output_embeddings())(hidden.last_hidden_state)[0, 1:]


def write_speculators_drafter(
    path: Path, target, kept: torch.Tensor | None = None, layers: dict | None = None, weights=None, **fields
) -> Path:
    """Write a DFlash checkpoint as the speculators library saves it, and return its folder.

    The config of the layers holds only what differs from the defaults of their model type.

    Args:
        path: the folder.
        target: the model that the drafter drafts for. It lends its embedding and its head.
        kept: `[n]`, the tokens of a reduced head. None keeps the whole vocabulary.
        layers: fields of the layers' config.
        weights: weights to add or replace by name. None removes a weight.
        fields: fields of config.json. None removes a field.
    """
    state = {**tiny_dflash_drafter(target).state_dict()}
    head = target.get_output_embeddings().weight.detach()
    state["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    state["lm_head.weight"] = (head if kept is None else head[kept]).clone()
    if kept is not None:
        state["d2t"] = kept - torch.arange(len(kept))
        state["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, kept, True)
    state.update(weights or {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/model", "architectures": []}},
        "block_size": 5,
        "draft_vocab_size": VOCAB_SIZE if kept is None else len(kept),
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 3,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            **(layers or {}),
        },
        **fields,
    }
    config = {name: value for name, value in config.items() if value is not None}
    state = {name: value.contiguous() for name, value in state.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(state, path / "model.safetensors")
    return path


def random_states() -> tuple:
    """Return the global random states of torch, Python and NumPy."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def assert_refused(names: str, call: Callable, *args, **kwargs) -> None:
    """Assert that a call raises a ValueError that matches `names`, before it has used any global random state."""
    states = random_states()
    with pytest.raises(ValueError, match=names):
        call(*args, **kwargs)
    assert random_states() == states


@contextmanager
def unchanged(model) -> Iterator[None]:
    """Assert that afterwards the settings of an enabled model and its texts, with and without a tree, are as before."""
    prompt, settings = random_ids(12), {"max_new_tokens": 10}
    before = generate(model, prompt, **settings)
    own_settings = vars(copy.deepcopy(model.generation_config))
    yield
    assert vars(model.generation_config) == own_settings
    assert generate(model, prompt, **settings).tolist() == before.tolist()
    assert generate(model, prompt, tree_budget=8, **settings).tolist() == before.tolist()


@contextmanager
def process_default(default: torch.dtype | str) -> Iterator[None]:
    """Set torch's process-wide default dtype, or its default device, inside the context."""
    dtype = torch.get_default_dtype()
    if isinstance(default, torch.dtype):
        torch.set_default_dtype(default)
    else:
        torch.set_default_device(default)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to fp32 rounding, relative to the largest finite entry of the tensor."""
    finite = expected[expected.isfinite()]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(finite.abs().max())))


def assert_same_cache(cache, expected) -> None:
    """Assert that two caches have equally many rows in every layer, with the same keys and values."""
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, expected_layer in zip(cache.layers, expected.layers, strict=True):
        assert type(layer) is type(expected_layer)
        assert layer.get_seq_length() == expected_layer.get_seq_length()
        for states, expected_states in [(layer.keys, expected_layer.keys), (layer.values, expected_layer.values)]:
            # rounding is relative to the largest entries that went into the sums, and a wrong row differs by their size
            tolerance = 1e-5 * float(expected_states.abs().max())
            torch.testing.assert_close(states, expected_states, rtol=0, atol=tolerance)


def copy_sources(folder: Path) -> None:
    """Copy what the package is built from into an existing folder. A build leaves files beside the sources."""
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "hf_ddtree", folder / "hf_ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
