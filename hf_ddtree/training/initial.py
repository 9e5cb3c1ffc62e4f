"""The drafter that a run starts from: random weights, or the weights of a finished drafter."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.dflash_model import DFlashConfig, DFlashDraftModel, evenly_spaced_layers
from ..drafters.load import load_drafter
from .config import TrainConfig
from .scale import remove_scale

DEFAULT_TAPS = 5
DEFAULT_ROPE_THETA = 10_000.0


def new_drafter(target: PreTrainedModel, config: TrainConfig) -> DFlashDraftModel:
    """Create a drafter with random weights that has the target's width and the shape of its attention.

    Args:
        target: the model to draft for.
        config: gives the number of layers, the block size, the mask token and the layers to read.
    """
    shape = target.config.get_text_config(decoder=True)
    heads = shape.num_attention_heads
    layer_ids = config.layer_ids or evenly_spaced_layers(shape.num_hidden_layers, DEFAULT_TAPS)
    drafter = DFlashDraftModel(
        DFlashConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(shape, "num_key_value_heads", None) or heads,
            head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=getattr(shape, "rms_norm_eps", 1e-6),
            rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(shape)},
            num_target_layers=shape.num_hidden_layers,
            block_size=config.block_size,
            dflash_config={"mask_token_id": config.mask_token_id, "target_layer_ids": layer_ids},
            bos_token_id=shape.bos_token_id,
            eos_token_id=shape.eos_token_id,
            pad_token_id=shape.pad_token_id,  # a pipeline compares all three ids with the target's
            tie_word_embeddings=False,
        )
    )
    # The head is the target's, and its rows may be large. This norm starts the logits with a spread of 1.
    spread = target.get_output_embeddings().weight.detach().float().std() * shape.hidden_size**0.5
    torch.nn.init.constant_(drafter.norm.weight, 1 / float(spread))
    return drafter


def _rope_theta(shape: PreTrainedConfig) -> float:
    """Return the target's RoPE base, or the usual one if the target has none or several."""
    parameters = getattr(shape, "rope_parameters", None) or {}
    return parameters.get("rope_theta") or DEFAULT_ROPE_THETA


def start_from(initial: str, drafter: DFlashDraftModel, scale: torch.Tensor) -> None:
    """Copy the weights of a finished drafter into a new one, which reads scaled hidden states.

    Args:
        initial: path or Hub id of the finished drafter.
        drafter: the new drafter. Its weights are replaced.
        scale: `[taps * H]`, the result of `state_scale`.

    Raises:
        ValueError: if the finished drafter is not a DFlash drafter, or has another shape than the new one.
    """
    finished = load_drafter(initial, dtype=torch.float32)
    if not isinstance(finished, DFlashDraftModel):
        raise ValueError(
            f"--initial {initial} is a {type(finished).__name__}, but only the weights of a DFlash drafter can be "
            "copied. Pass a DFlash drafter, or drop --initial to start from random weights."
        )
    ours, theirs = _shape_options(drafter), _shape_options(finished)
    differing = ", ".join(f"{name} {theirs[name]} (not {ours[name]})" for name in ours if ours[name] != theirs[name])
    if differing:
        raise ValueError(
            f"--initial {initial} has another shape than the drafter to train, so its weights do not fit. It needs "
            f"{differing}. Set these options, or drop --initial to start from random weights."
        )
    drafter.load_state_dict(finished.state_dict())
    remove_scale(drafter, scale)


def _shape_options(drafter: DFlashDraftModel) -> dict[str, object]:
    """Return the options that decide a drafter's shape, with the values that it has."""
    config = drafter.config
    return {
        "--num-layers": config.num_hidden_layers,
        "--block-size": config.block_size,
        "--layer-ids": config.target_layer_ids,
        "--mask-token-id": config.mask_token_id,
        "--model of width": config.hidden_size,
    }
