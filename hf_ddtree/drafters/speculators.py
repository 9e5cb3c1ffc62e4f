"""DFlash drafters in the layout of the speculators library, with an embedding and a head of their own."""

from typing import ClassVar

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from ..messages import quoted
from .dflash_model import DFlashConfig, DFlashDraftModel, check_block


class SpeculatorsDFlashConfig(DFlashConfig):
    """A DFlash config plus the fields that the speculators layout adds.

    Args:
        draft_vocab_size: the number of rows of the drafter's own head.
        sample_from_anchor: whether slot k predicts token k + 1, so that the root's own slot predicts, too.
        sliding_window_non_causal: whether sliding layers see the whole block, instead of the slots up to their own.
    """

    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False

    @classmethod
    def from_fields(cls, fields: dict, name: str) -> "SpeculatorsDFlashConfig":
        """Return the config that a checkpoint's config.json describes.

        Args:
            fields: the content of config.json.
            name: the name of the checkpoint, for messages.

        Raises:
            ValueError: for another algorithm, or if a field is missing.
        """
        algorithm = fields["speculators_model_type"]
        if algorithm != "dflash":
            raise ValueError(
                f"{name}: a speculators checkpoint of type {quoted(algorithm)} is not a DFlash drafter; load one of "
                "type 'dflash'."
            )
        given = dict(fields.get("transformer_layer_config") or {})
        # the file holds only the differences from the defaults of its model type
        layers = AutoConfig.for_model(given.pop("model_type", "qwen3"), **given)
        shape = {key: getattr(layers, key) for key in Qwen3Config().to_dict() if hasattr(layers, key)}
        rope = shape.get("rope_parameters") or {}
        shape["rope_parameters"] = rope.get("sliding_attention", rope)  # one embedding serves all layers
        # These ids count the embedding's output as 0, and the z-lab layout counts layers from 0. The embedding's output
        # is therefore layer -1.
        taps = [index - 1 for index in fields.get("aux_hidden_state_layer_ids") or ()]
        check_block(fields.get("block_size"), fields.get("mask_token_id"), taps, name)
        for key in ("architectures", "model_type", "transformers_version", "dtype"):
            shape.pop(key, None)
        return cls(
            **shape,
            block_size=fields["block_size"],
            dflash_config={"mask_token_id": fields["mask_token_id"], "target_layer_ids": taps},
            draft_vocab_size=fields.get("draft_vocab_size") or layers.vocab_size,
            sample_from_anchor=fields.get("sample_from_anchor", False),
            sliding_window_non_causal=fields.get("sliding_window_non_causal", False),
        )


class SpeculatorsDFlashModel(DFlashDraftModel):
    """A DFlash drafter with an embedding and a head of its own.

    The head has `draft_vocab_size` rows. `d2t`, `[draft_vocab_size]` int64, is the token id minus the row for each row.

    Args:
        config: the config.
    """

    config: SpeculatorsDFlashConfig
    config_class = SpeculatorsDFlashConfig
    # parts of the target that training needs, and the inverse of d2t
    _keys_to_ignore_on_load_unexpected: ClassVar = ["verifier_norm.weight", "verifier_lm_head.weight", "t2d"]

    def __init__(self, config: SpeculatorsDFlashConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        n_rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, n_rows, bias=False)
        d2t = None
        if n_rows != config.vocab_size:
            d2t = torch.zeros(n_rows, dtype=torch.long, device=self.lm_head.weight.device)
        self.register_buffer("d2t", d2t)
        self.post_init()

    def check_vocabulary(self, name: str) -> None:
        """Raise a ValueError unless each row of the head stands for a token of its own.

        Args:
            name: the name of the checkpoint, for the message.
        """
        if self.d2t is not None:
            token_ids = self._token_ids()
            inside = bool(((token_ids >= 0) & (token_ids < self.config.vocab_size)).all())
            if not inside or len(token_ids.unique()) < len(token_ids):
                raise ValueError(
                    f"{name}: d2t does not map the draft vocabulary into the target's one to one; download the "
                    "checkpoint again."
                )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, `[.., V]`: minus infinity where the head has no row.

        Args:
            states: `[.., H]`, the drafter's states.
        """
        logits = self.lm_head(states)
        if self.d2t is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, self._token_ids(), logits)

    def _token_ids(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), dtype=torch.long, device=self.d2t.device)

    def _sliding_mask(self, noise_embeds: torch.Tensor, n_context: int, cache) -> torch.Tensor:
        """Return a mask that shows the context within the window, and the block up to the query's slot or all of it."""
        n = noise_embeds.shape[1]
        layer = self.config.layer_types.index("sliding_attention")
        n_keys = n_context + n if cache is None else cache.get_mask_sizes(n, layer)[0]
        keys = torch.arange(n - n_keys, n, dtype=torch.long, device=noise_embeds.device)  # relative to the root
        slots = torch.arange(n, dtype=torch.long, device=noise_embeds.device)[:, None]
        in_window = (keys < 0) & (keys >= -self.config.sliding_window)
        in_block = (keys >= 0) & ((keys <= slots) | self.config.sliding_window_non_causal)
        mask = torch.zeros(n, n_keys, dtype=noise_embeds.dtype, device=noise_embeds.device)
        return mask.masked_fill_(~(in_window | in_block), torch.finfo(mask.dtype).min)[None, None]
