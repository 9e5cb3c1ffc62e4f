"""Models that PEFT has changed: which of them can be a target, and the model inside a wrapper that is a drafter.

PEFT is not imported, because this package does not need it. It changes a model in two ways. Adapters such as LoRA live
in the layers of the base model, so the base model is the adapted model. Prompt learning (prompt tuning, prefix tuning,
p-tuning and others) lives in the wrapper, which changes the inputs of every forward.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def check_adapters(model: PreTrainedModel) -> None:
    """Raise a ValueError if PEFT changes the forward of a target in a way that a tree cannot follow.

    Args:
        model: the target.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")  # the wrapper puts its own here while it generates
    method = _prompt_learning(getattr(prepare, "__self__", None))
    if method is not None:
        raise ValueError(
            f"model: PEFT's {method} adds virtual tokens to the inputs of every forward, also to those over a tree; "
            "call generate without tree_budget, or use an adapter that lives in the layers, such as LoRA."
        )
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise ValueError(
                f"model: the adapter '{name}' is an activated LoRA, which counts the tokens of a forward from its end, "
                "and the nodes of a tree are no sequence; delete the adapter, or call generate without tree_budget."
            )


def inside_wrapper(assistant_model: Any) -> Any:
    """Return the adapted model inside a wrapper of PEFT, and anything else as it is.

    Args:
        assistant_model: what the user passed.

    Raises:
        ValueError: if the wrapper changes the inputs of the model.
    """
    is_wrapper = isinstance(assistant_model, nn.Module) and not isinstance(assistant_model, PreTrainedModel)
    if not is_wrapper or not hasattr(assistant_model, "get_base_model"):
        return assistant_model
    method = _prompt_learning(assistant_model)
    if method is not None:
        raise ValueError(
            f"assistant_model: PEFT's {method} adds virtual tokens to the inputs of the drafter, which a tree does not "
            "have; pass assistant_model.get_base_model(), or a drafter with an adapter such as LoRA."
        )
    return assistant_model.get_base_model()


def _prompt_learning(wrapper: Any) -> str | None:
    """Return the name of the method of prompt learning that a wrapper uses, or None."""
    config: Any = getattr(wrapper, "active_peft_config", None)
    return config.peft_type.value if getattr(config, "is_prompt_learning", False) else None
