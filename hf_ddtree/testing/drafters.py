"""Small random drafters, and a drafter that knows what the target will say."""

import random

import torch
from transformers import PreTrainedModel
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from ..drafters.base import Drafter
from ..drafters.dflash_model import DFlashConfig, DFlashDraftModel
from ..tree import DraftTree
from .families import SHAPE, VOCAB_SIZE, WINDOW


def tiny_dflash_drafter(target: PreTrainedModel, seed: int = 0, **overrides) -> DFlashDraftModel:
    """Return a random DFlash model that fits a target.

    Args:
        target: the target.
        seed: seeds the weights. The global random state stays as it is.
        overrides: config fields.
    """
    text_config = target.config.get_text_config(decoder=True)
    fields = {
        **SHAPE,
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        "num_hidden_layers": 2,
        "num_target_layers": text_config.num_hidden_layers,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, text_config.num_hidden_layers - 2]},
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DFlashDraftModel(DFlashConfig(**fields))
    return drafter.to(target.dtype).eval()


def tiny_muse_glimmer_drafter(target: PreTrainedModel, seed: int = 0) -> MuseGlimmerAssistantModel:
    """Return a random model of transformers' own DFlash class for a target.

    Args:
        target: the target.
        seed: seeds the weights. The global random state stays as it is.
    """
    text_config = target.config.get_text_config(decoder=True)
    fields = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    config = MuseGlimmerAssistantConfig(
        **{**fields, "hidden_size": text_config.hidden_size, "num_hidden_layers": 2},
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=5,
        mask_token_id=3,
        target_layer_ids=[0, 2],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MuseGlimmerAssistantModel(config).to(target.dtype).eval()


class ScriptedDrafter(Drafter):
    """Drafts random trees around a known continuation, so that scattered paths of every length are accepted.

    Each node of the script gets decoy siblings before and after it. Decoys get children, too, among them the script's
    next token, so that cousins share tokens.

    Args:
        script: the sequence that the target is going to produce, prompt included.
        hit_rate: the probability that a further token of the script is in the tree.
        seed: seeds the trees.
        taps: hidden states that the loop shall hand over. They are kept in `context`.
    """

    def __init__(self, script: list[int], hit_rate: float = 0.8, seed: int = 0, taps: tuple[int, ...] = ()):
        self.script, self.hit_rate, self.rng = script, hit_rate, random.Random(seed)
        self.taps = taps
        self.context: list[torch.Tensor] = []

    def prefill(self, hidden_states, position_ids):
        self.context.append(hidden_states)

    def commit(self, path, hidden_states):
        self.context.append(hidden_states)

    def draft(self, input_ids, tree_budget, max_depth):
        position = input_ids.shape[1]
        token_ids, parents = [int(input_ids[0, -1])], [-1]
        level = [0]
        on_script: int | None = 0
        for depth in range(max_depth):
            if len(token_ids) > tree_budget or position + depth >= len(self.script):
                break
            follow = on_script is not None and self.rng.random() < self.hit_rate
            next_token = self.script[position + depth]
            edges = self._edges(level, on_script if follow else None, next_token)
            edges = edges[: tree_budget + 1 - len(token_ids)]
            first = len(token_ids)
            token_ids += [token for _, token in edges]
            parents += [parent for parent, _ in edges]
            on_script = first + edges.index((on_script, next_token)) if (on_script, next_token) in edges else None
            level = list(range(first, len(token_ids)))
        return DraftTree.from_lists(token_ids, parents)

    def _edges(self, level, on_script, next_token):
        edges = set()
        for node in self.rng.sample(level, min(2, len(level))):
            edges |= {(node, self.rng.randrange(VOCAB_SIZE)) for _ in range(2)}
            edges.add((node, next_token))  # a cousin of the script's node, unless it is that node
        if on_script is None:
            return sorted(edges, key=lambda _: self.rng.random())
        return sorted(edges | {(on_script, next_token)}, key=lambda _: self.rng.random())
