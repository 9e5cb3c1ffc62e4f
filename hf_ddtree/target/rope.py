"""RoPE whose frequencies change with the longest position of a forward."""

from transformers import PreTrainedConfig


def frequency_changes(config: PreTrainedConfig) -> dict[str, int]:
    """Return, for each RoPE type whose frequencies change, the number of positions up to which they stay.

    Such frequencies follow the longest position in a forward, so all nodes of a tree must lie on one side of the
    change. "longrope" has two sets of frequencies. "dynamic" changes them with every position beyond the first change.

    Args:
        config: the text config. Its `rope_parameters` may differ by layer type.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {
        rope["rope_type"]: rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in by_layer_type or [parameters]
        if rope.get("rope_type") in ("longrope", "dynamic")
    }
