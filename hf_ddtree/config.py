"""The tree options of `generate`, and what a request must look like to be decoded with a tree."""

from dataclasses import dataclass

from transformers import GenerationConfig

from .attention import BACKENDS
from .cache import check_cache
from .masks import MASKED_LAYER_TYPES, SUPPORTED_ATTENTION
from .tree import POLICIES, Policy

TREE_OPTIONS = ("tree_budget", "tree_sampling", "tree_attention", "tree_trace", "tree_timing")
# a forward over this many tokens costs as much as a long prompt, every round; a larger number is a slip
LARGEST_BUDGET = 16_384
# names in `config.layer_types` of layers whose state is in the cache, and of layers without any
HYBRID_LAYER_TYPES = ("hybrid", "hybrid_sliding")  # attention and a recurrent state side by side
RECURRENT_LAYER_TYPES = ("linear_attention", "conv", *HYBRID_LAYER_TYPES, "mlp", "moe")
# In transformers 5.24 these compute something else over several tokens after a cached text than token by token: so little
# that only fp32 tells it from rounding, or so much that the text changes.
INCONSISTENT_MODEL_TYPES = ("jamba", "nemotron_h", "recurrent_gemma", "zamba2")
CACHE_IMPLEMENTATIONS = (None, "dynamic")


@dataclass(frozen=True)
class TreeConfig:
    """The tree options of one `generate` call.

    Args:
        tree_budget: drafted nodes per round, root excluded; from 1 to 16,384, usually 8 to 1024. "auto": what is worth its
            time on this machine, every round anew, down to no draft at all.
        tree_sampling: which children the nodes get under `do_sample=True`, and so how many drafted tokens are kept; the
            output has the target's distribution with each. Prompt look-up draws none, a drafter of your own chooses itself.
            - "target": the most probable ones; the target's own draw is kept if it is among them. The same seed gives the
              same text as plain sampling.
            - "hybrid": these and one drawn from the drafter's distribution outside them.
            - "swor": drawn without replacement.
            - "spectr": drawn independently.
        tree_attention: what verifies the tree.
            - "triton": the kernel, without a mask.
            - "sdpa": PyTorch's attention or, where a model needs it, transformers' eager one, under masks.
            - "auto": "triton" on a GPU where it is installed and fits the model, else "sdpa".
        tree_trace: keep each round's tree and path in the output's `rounds`.
        tree_timing: keep each round's seconds per stage, at the price of waiting for the device between stages.

    Raises:
        ValueError: for a value that is none of these, and where other options come without `tree_budget`; it names the
            option.
    """

    tree_budget: int | str
    tree_sampling: str = "hybrid"
    tree_attention: str = "auto"
    tree_trace: bool = False
    tree_timing: bool = False

    def __post_init__(self):
        budget = self.tree_budget
        is_number = isinstance(budget, int) and not isinstance(budget, bool)
        if budget != "auto" and not (is_number and 1 <= budget <= LARGEST_BUDGET):
            raise ValueError(
                f"tree_budget={budget!r}: it is the number of drafted nodes per round and must be an int from 1 to "
                f'{LARGEST_BUDGET}, or "auto". Leave it out for plain generation.'
            )
        if self.tree_sampling not in POLICIES:
            raise ValueError(f"tree_sampling={self.tree_sampling!r} is unknown; choose one of {tuple(POLICIES)}.")
        if self.tree_attention not in BACKENDS:
            raise ValueError(f"tree_attention={self.tree_attention!r} is unknown; choose one of {BACKENDS}.")
        for name in ("tree_trace", "tree_timing"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")

    @property
    def policy(self) -> Policy:
        """The policy `tree_sampling` names."""
        return POLICIES[self.tree_sampling]

    @classmethod
    def from_options(cls, options: dict) -> "TreeConfig | None":
        """The config of the options that are not None, or None if there are none: a plain request."""
        options = {name: value for name, value in options.items() if value is not None}
        if not options:
            return None
        if "tree_budget" not in options:
            raise ValueError(f"{sorted(options)} need tree_budget, the number of drafted nodes per round.")
        return cls(**options)


def check_model(model, argument: str = "model", recurrent: bool = True) -> None:
    """Raise a ValueError if tree decoding does not work for the kind of model, naming what is in the way.

    Args:
        argument: what the user passed it as.
        recurrent: whether its layers may carry a recurrent state.
    """
    config = model.config
    text_config = config.get_text_config(decoder=True)
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{argument}: {name} is an encoder-decoder; tree decoding is for decoder-only causal LMs.")
    if getattr(text_config, "attention_chunk_size", None) is not None:
        raise ValueError(f"{argument}: {name} has chunked attention, which tree decoding does not support.")
    if text_config.model_type in INCONSISTENT_MODEL_TYPES:
        raise ValueError(
            f"{argument}: the recurrent layers of {name} compute something else over several tokens than one by one, so no "
            "verification can equal plain decoding; call generate without `tree_budget`."
        )
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    supported = MASKED_LAYER_TYPES + (RECURRENT_LAYER_TYPES if recurrent else ())
    unknown = layer_types - set(supported)
    no_attention = layer_types.isdisjoint(MASKED_LAYER_TYPES + HYBRID_LAYER_TYPES) and model._is_stateful
    if unknown or no_attention:
        kind = f"layers of type {sorted(unknown)}" if unknown else "nothing but recurrent layers"
        way_out = "call generate without `tree_budget`" if recurrent else "choose another drafter"
        raise ValueError(
            f"{argument}: {name} has {kind}, where sibling branches would mix. Supported are {list(supported)}; {way_out}."
        )
    implementation = text_config._attn_implementation
    if implementation not in SUPPORTED_ATTENTION:
        raise ValueError(
            f"attn_implementation={implementation!r} takes no tree mask; call "
            f"model.set_attn_implementation('sdpa') (supported: {list(SUPPORTED_ATTENTION)})."
        )


def check_settings(settings: GenerationConfig) -> None:
    """Raise a ValueError for any setting of `generate` that does not go together with `tree_budget`, naming it."""
    conflicts = {
        "num_beams": (settings.num_beams or 1) > 1,
        "num_beam_groups": (settings.num_beam_groups or 1) > 1,
        "constraints": settings.constraints is not None,
        "force_words_ids": settings.force_words_ids is not None,
        "penalty_alpha": bool(settings.penalty_alpha),
        "dola_layers": settings.dola_layers is not None,
        "prompt_lookup_num_tokens": settings.prompt_lookup_num_tokens == 0,
        "num_return_sequences": (settings.num_return_sequences or 1) > 1,
        "use_cache": settings.use_cache is False,
        "cache_implementation": settings.cache_implementation not in CACHE_IMPLEMENTATIONS,
        "output_attentions": bool(settings.output_attentions),
        "output_hidden_states": settings.output_hidden_states not in (None, False, True),
        "use_mtp": bool(settings.use_mtp),
        "assistant_early_exit": settings.assistant_early_exit is not None,
        "assistant_ensemble_weight": settings.assistant_ensemble_weight is not None,
    }
    advice = {
        "num_return_sequences": "call generate once per sequence",
        "prompt_lookup_num_tokens": "it is the depth of the tree, at least 1",
        "use_cache": "leave it at True",
        "cache_implementation": "use the default dynamic cache",
        "output_hidden_states": "pass True or False",
        "assistant_ensemble_weight": "leave it out: it would change the target's distribution",
    }
    for name, conflicting in conflicts.items():
        if conflicting:
            way_out = advice.get(name, "drop it, or drop tree_budget")
            raise ValueError(f"{name}={getattr(settings, name)!r} does not work with tree_budget: {way_out}.")


def check_mode_kwargs(mode_kwargs: dict) -> None:
    """Raise a ValueError for arguments of `generate` outside its settings that do not go together with `tree_budget`.

    Args:
        mode_kwargs: `assistant_model`, `streamer`, `tokenizer`, ... as `generate` collected them.
    """
    if "synced_gpus" not in mode_kwargs:  # only a callable that does not ask for it goes without
        raise ValueError("custom_generate replaces the decoding loop; drop it, or drop tree_budget.")
    if mode_kwargs["synced_gpus"]:
        raise ValueError("synced_gpus=True does not work with tree_budget: drop it, or drop tree_budget.")
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer: tree decoding needs a drafter with the target's own vocabulary; drop it."
        )


def check_inputs(model, input_ids, generation_config: GenerationConfig, model_kwargs: dict) -> None:
    """Raise a ValueError, before anything runs, for inputs that tree decoding cannot take.

    Args:
        input_ids: `[B, S]` int64.
        model_kwargs: the keyword arguments `generate` prepared for the forward.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: a batch of {input_ids.shape[0]}; tree decoding takes one sequence per call.")
    position_ids, cache = model_kwargs.get("position_ids"), model_kwargs.get("cache")
    if position_ids is None:
        raise ValueError(
            f"model: {type(model).__name__} does not take position_ids, so the nodes of a tree cannot be placed; call "
            "generate without tree_budget."
        )
    if cache is None:
        raise ValueError(f"model: {type(model).__name__} has no key/value cache; call generate without tree_budget.")
    check_cache(cache)
    prompt_length = position_ids.shape[-1]
    check_rope(model, prompt_length, prompt_length + generation_config.max_length - input_ids.shape[1])


def check_rope(model, length: int, max_length: int) -> None:
    """Raise a ValueError if RoPE frequencies would change within the request.

    Length-dependent frequencies are computed from the longest position in the forward, so a deep node would change
    them for every other node.
    """
    text_config = model.config.get_text_config(decoder=True)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
        rope_type = rope.get("rope_type")
        crosses = (rope_type == "longrope" and length <= original < max_length) or (
            rope_type == "dynamic" and max_length > original
        )
        if crosses:
            raise ValueError(
                f"max_length={max_length} crosses {original} tokens, where this model's {rope_type!r} RoPE changes its "
                f"frequencies; keep prompt and max_new_tokens within {original}, or drop tree_budget."
            )
