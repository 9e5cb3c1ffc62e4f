"""Every refusal of a request, at entry. Each raises a ValueError that names the argument and the way out.

Each check has one subject: the class, the options, the model, the settings, the arguments, the inputs, the drafter, the
attention, the budget. enable.py calls them in this order, before anything runs. Problems that show only later are
refused elsewhere: a wrong tree forward in target/selfcheck.py, and a wrong checkpoint in drafters/load.py.
"""

from typing import Any, NoReturn

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ._transformers import attention_implementation
from .drafters.base import Drafter
from .drafters.choose import DFLASH_MODELS
from .drafters.dflash import DFlashDrafter
from .drafters.dflash_model import check_block
from .drafters.speculators import SpeculatorsDFlashModel
from .messages import quoted
from .request import MAX_TREE_BUDGET, TREE_OPTIONS, Request, TreeConfig
from .sampling.policies import POLICIES
from .target.attention import text_config
from .target.cache import ATTENTION_LAYERS, RECURRENT_LAYERS, is_recurrent
from .target.kernel_attention import kernel_problem
from .target.layer_types import (
    HYBRID_LAYER_TYPES,
    INCONSISTENT_MODEL_TYPES,
    MASKED_LAYER_TYPES,
    RECURRENT_LAYER_TYPES,
    RECURRENT_MODEL_TYPES,
)
from .target.path_verifier import is_path_by_path
from .target.prefill import text_positions
from .target.rope import frequency_changes

ATTENTION_BACKENDS = ("auto", "sdpa", "triton")
SUPPORTED_IMPLEMENTATIONS = ("eager", "sdpa")
SUPPORTED_CACHES = (None, "dynamic")
# Models of one tokenizer pad their vocabulary to multiples of up to 512. A larger difference means other tokens: with
# its 768 control tokens, a later tokenizer of Mistral shifted the ids of all others.
MAX_VOCAB_PADDING = 512


def check_class(model: object) -> None:
    """Raise a ValueError for an object that is not a causal LM of transformers.

    Args:
        model: what the user passed to `enable`.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ValueError(
            f"model: hf_ddtree.enable takes a transformers causal LM, not a {type(model).__name__}. For a wrapped "
            "model (PEFT, torch.compile) enable the model inside, for example "
            "hf_ddtree.enable(peft_model.get_base_model())."
        )


def check_options(options: list[str]) -> None:
    """Raise a ValueError for tree options without `tree_budget`.

    Args:
        options: the names of the tree options in a call without a budget, apart from those that are False.
    """
    if options:
        raise ValueError(f"{sorted(options)} need tree_budget, the number of drafted nodes per round; pass it too.")


def check_tree_config(config: TreeConfig) -> None:
    """Raise a ValueError for a value that a tree option does not take.

    Args:
        config: the tree options of the call.
    """
    budget = config.tree_budget
    is_number = isinstance(budget, int) and not isinstance(budget, bool)
    if budget != "auto" and not (is_number and 1 <= int(budget) <= MAX_TREE_BUDGET):
        raise ValueError(
            f"tree_budget={quoted(budget)} is not a number of drafted nodes per round. Pass an int from 1 to "
            f"{MAX_TREE_BUDGET} or 'auto', or leave it out for plain generation."
        )
    for name, value, choices in (
        ("tree_sampling", config.tree_sampling, tuple(POLICIES)),
        ("tree_attention", config.tree_attention, ATTENTION_BACKENDS),
    ):
        if value not in choices:
            raise ValueError(f"{name}={quoted(value)} is unknown; choose one of {choices}.")
    for name in ("tree_trace", "tree_timing"):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={quoted(getattr(config, name))} must be True or False.")


def check_model(model: PreTrainedModel, argument: str = "model", recurrent: bool = True) -> None:
    """Raise a ValueError if tree decoding does not work for this kind of model.

    Args:
        model: a target, or a causal LM as drafter.
        argument: the name under which the user passed it.
        recurrent: whether its layers may carry a recurrent state.
    """
    config = text_config(model)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{argument}: {name} is an encoder-decoder, and tree decoding is for decoder-only causal LMs; call "
            "generate without tree_budget."
        )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(
            f"{argument}: {name} has chunked attention, which tree decoding does not support; call generate without "
            "tree_budget."
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{argument}: {name} computes its positions from the attention mask (ALiBi), and a tree has another mask; "
            "call generate without tree_budget."
        )
    if config.model_type in INCONSISTENT_MODEL_TYPES:
        raise ValueError(
            f"{argument}: the recurrent layers of {name} compute something else over several tokens than one by one, "
            "so no verification can equal plain decoding; call generate without tree_budget."
        )
    _check_layers(model, argument, recurrent)
    implementation = attention_implementation(config)
    if implementation not in SUPPORTED_IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={quoted(implementation)} takes no tree mask; call "
            f"model.set_attn_implementation('sdpa') (supported: {list(SUPPORTED_IMPLEMENTATIONS)})."
        )


def _check_layers(model: PreTrainedModel, argument: str, recurrent: bool) -> None:
    config = text_config(model)
    layer_types = set(getattr(config, "layer_types", None) or ())
    no_attention = config.model_type in RECURRENT_MODEL_TYPES
    if layer_types:
        no_attention = layer_types.isdisjoint(MASKED_LAYER_TYPES + HYBRID_LAYER_TYPES)
    supported = MASKED_LAYER_TYPES + (RECURRENT_LAYER_TYPES if recurrent else ())
    unknown = layer_types - set(supported)
    if unknown or no_attention:
        kind = f"layers of type {sorted(unknown)}" if unknown else "only recurrent layers"
        way_out = "call generate without tree_budget" if recurrent else "choose another drafter"
        raise ValueError(
            f"{argument}: {type(model).__name__} has {kind}, where sibling branches would mix. Supported are "
            f"{list(supported)}; {way_out}."
        )


def check_settings(settings: GenerationConfig) -> None:
    """Raise a ValueError for a setting of `generate` that does not work with `tree_budget`.

    Args:
        settings: the settings of the call.
    """
    drop = "drop it, or drop tree_budget"
    refusals = {  # setting: (whether it conflicts, the way out)
        "num_beams": ((settings.num_beams or 1) > 1, drop),
        "num_beam_groups": ((settings.num_beam_groups or 1) > 1, drop),
        "constraints": (settings.constraints is not None, drop),
        "force_words_ids": (settings.force_words_ids is not None, drop),
        "penalty_alpha": (bool(settings.penalty_alpha), drop),
        "dola_layers": (settings.dola_layers is not None, drop),
        "prompt_lookup_num_tokens": (
            settings.prompt_lookup_num_tokens == 0,
            "it is the depth of the tree, so pass at least 1",
        ),
        "num_return_sequences": ((settings.num_return_sequences or 1) > 1, "call generate once per sequence"),
        "use_cache": (settings.use_cache is False, "leave it at True"),
        "cache_implementation": (
            settings.cache_implementation not in SUPPORTED_CACHES,
            "use the default dynamic cache",
        ),
        "output_attentions": (bool(settings.output_attentions), drop),
        "output_hidden_states": (settings.output_hidden_states not in (None, False, True), "pass True or False"),
        "use_mtp": (bool(settings.use_mtp), drop),
        "compile_config": (settings.compile_config is not None, "tree decoding does not compile the model, so drop it"),
        "assistant_early_exit": (settings.assistant_early_exit is not None, drop),
        "assistant_ensemble_weight": (
            settings.assistant_ensemble_weight is not None,
            "leave it out, because it would change the target's distribution",
        ),
    }
    for name, (conflicts, way_out) in refusals.items():
        if conflicts:
            raise ValueError(f"{name}={quoted(getattr(settings, name))} does not work with tree_budget: {way_out}.")


def check_returned(config: TreeConfig, settings: GenerationConfig) -> None:
    """Raise a ValueError for a tree option that only adds to `rounds` in a call that returns the tokens alone.

    Args:
        config: the tree options of the call.
        settings: the settings of the call.
    """
    if not settings.return_dict_in_generate:
        for name in ("tree_trace", "tree_timing"):
            if getattr(config, name):
                raise ValueError(
                    f"{name}=True adds to the rounds of the output, and this call returns the tokens alone; pass "
                    f"return_dict_in_generate=True too, or drop {name}."
                )


def check_speculation(settings: GenerationConfig, assistant_model: object) -> None:
    """Raise a ValueError if settings of transformers' own speculation contradict the drafter of the tree.

    Args:
        settings: the settings of the call.
        assistant_model: what the user passed.
    """
    if assistant_model is not None and settings.prompt_lookup_num_tokens is not None:
        raise ValueError(
            f"prompt_lookup_num_tokens={settings.prompt_lookup_num_tokens} is the depth of a prompt look-up tree, and "
            "assistant_model drafts this one; drop one of them."
        )
    model = assistant_model.model if isinstance(assistant_model, DFlashDrafter) else assistant_model
    if settings.speculation_type is not None and not (
        settings.speculation_type == "dflash" and isinstance(model, DFLASH_MODELS)
    ):
        raise ValueError(
            f"speculation_type={quoted(settings.speculation_type)} does not work with tree_budget, which takes "
            "'dflash' with a DFlash drafter as assistant_model; drop it."
        )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise a ValueError for an argument of `generate`, not a setting, that does not work with `tree_budget`.

    Args:
        arguments: `assistant_model`, `streamer`, `tokenizer`, ... as `generate` collected them.
    """
    if "synced_gpus" not in arguments:  # only a custom callable without this parameter leads here
        refuse_custom_generate()
    if arguments["synced_gpus"]:
        raise ValueError("synced_gpus=True does not work with tree_budget: drop it, or drop tree_budget.")
    # a pipeline passes both if a drafter's config has other special tokens, or none
    if arguments.get("assistant_tokenizer") not in (None, arguments.get("tokenizer")):
        raise ValueError(
            "assistant_tokenizer does not work with tree_budget, because a drafter needs the target's own vocabulary: "
            "drop it, or pass the target's own tokenizer."
        )


def check_plain_arguments(settings: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Raise a ValueError in a call without `tree_budget` for a drafter that plain assisted decoding cannot use.

    transformers' own decoding with a DFlash model, `speculation_type="dflash"`, stays possible.

    Args:
        settings: the settings of the call.
        arguments: `assistant_model`, `streamer`, `tokenizer`, ... as `generate` collected them.
    """
    drafter = arguments.get("assistant_model")
    own_mode = isinstance(drafter, DFLASH_MODELS) and settings.speculation_type == "dflash"
    if isinstance(drafter, (Drafter, *DFLASH_MODELS)) and not own_mode:
        raise ValueError(
            f"assistant_model: a {type(drafter).__name__} drafts trees; pass tree_budget, the number of drafted nodes "
            "per round, too."
        )


def refuse_custom_generate() -> NoReturn:
    """Raise a ValueError for `custom_generate` together with `tree_budget`."""
    raise ValueError("custom_generate replaces the decoding loop; drop it, or drop tree_budget.")


def check_continuous_batching(settings: GenerationConfig, options: dict[str, Any]) -> None:
    """Raise a ValueError for a tree option, of any value, in continuous batching.

    Args:
        settings: the settings of the call.
        options: its further keyword arguments.
    """
    for name in TREE_OPTIONS:
        for value in (options.get(name), getattr(settings, name, None)):
            if value is not None and value is not False:
                raise ValueError(
                    f"{name}={quoted(value)}: continuous batching (generate_batch, init_continuous_batching) decodes "
                    "without a tree; drop it, or call generate per sequence."
                )


def check_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, max_length: int, model_kwargs: dict[str, Any]
) -> None:
    """Raise a ValueError for inputs that tree decoding cannot take.

    Args:
        model: the target.
        input_ids: `[B, S]` int64.
        max_length: the maximum length of the finished sequence, in tokens.
        model_kwargs: the keyword arguments that `generate` prepared for the forward.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids holds a batch of {input_ids.shape[0]}, and tree decoding takes one sequence; call generate per "
            "sequence, or drop tree_budget."
        )
    position_ids, cache = model_kwargs.get("position_ids"), model_kwargs.get("cache")
    name = type(model).__name__
    if position_ids is None:
        raise ValueError(
            f"model: {name} does not take position_ids, so the nodes of a tree cannot be placed; call generate without "
            "tree_budget. If its forward is a wrapper, let it name the parameters of the original, for example by "
            "functools.wraps, or pass a prompt without padding."
        )
    if cache is None:
        raise ValueError(f"model: {name} has no key/value cache; call generate without tree_budget.")
    check_cache(cache)
    last_of_prompt = int(text_positions(position_ids)[0, -1])
    # the last token that `generate` emits does not run
    check_rope(model, last_of_prompt, last_of_prompt + max_length - input_ids.shape[1] - 1)


def check_cache(cache: Cache) -> None:
    """Raise a ValueError if a layer of a cache can neither keep scattered rows exactly nor be copied per path.

    Static layers have no room for a tree, and quantised ones lose precision when rows are written back.

    Args:
        cache: the cache of the call.
    """
    if cache.offloading:
        raise ValueError(
            "cache: rows of an offloaded cache move between devices while a path is committed; use a plain dynamic "
            "cache."
        )
    recurrent = any(map(is_recurrent, cache.layers))
    supported = ATTENTION_LAYERS + (RECURRENT_LAYERS if recurrent else ())
    for layer in cache.layers:
        if type(layer) not in supported:
            raise ValueError(
                f"cache: a layer of type {type(layer).__name__} cannot be compacted after tree verification. Tree "
                "decoding needs a dynamic cache: drop cache and cache_implementation, or call generate without "
                "tree_budget."
            )
    if recurrent and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError(
            "cache: all layers are recurrent, so it cannot tell how many tokens it holds; call generate without "
            "tree_budget."
        )


def check_rope(model: PreTrainedModel, last_of_prompt: int, last: int) -> None:
    """Raise a ValueError if RoPE frequencies would change within the request.

    Frequencies that depend on the length are computed from the longest position in the forward, so a deep node would
    change them for every other node. At the change, some models also run the whole text again. A prompt that already
    lies beyond the change is no problem for "longrope", which changes once.

    Args:
        model: the target.
        last_of_prompt: the position of the last token of the prompt.
        last: the last position that the target may run.
    """
    for rope_type, limit in frequency_changes(text_config(model)).items():
        beyond = rope_type == "longrope" and last_of_prompt >= limit
        if last >= limit and not beyond:
            raise ValueError(
                f"max_new_tokens: this request may run the tokens up to position {last}, and from position {limit} on, "
                f"this model's '{rope_type}' RoPE has other frequencies; lower max_new_tokens, or drop tree_budget."
            )


def check_assistant(assistant_model: object, target: PreTrainedModel, n_tokens: int) -> None:
    """Raise a ValueError if `assistant_model` is not a drafter for the target.

    Args:
        assistant_model: what the user passed.
        target: the model that generates.
        n_tokens: the longest sequence of the request without padding, in tokens.
    """
    if isinstance(assistant_model, Drafter) and assistant_model.used:
        raise ValueError("assistant_model: a drafter object serves one generate call; make a new one.")
    model = assistant_model.model if isinstance(assistant_model, DFlashDrafter) else assistant_model
    if model is None or isinstance(model, Drafter):
        return
    if getattr(model, "training", False):
        raise ValueError("assistant_model: the drafter is in training mode; call assistant_model.eval().")
    if isinstance(model, DFLASH_MODELS):
        check_dflash(model, target)
    elif isinstance(model, PreTrainedModel) and model.can_generate():
        check_causal_lm(model, target, n_tokens)
    else:
        raise ValueError(
            f"assistant_model: a {type(model).__name__} is not a drafter. Pass what hf_ddtree.load_drafter returns, a "
            "causal LM with the target's vocabulary, or None for prompt look-up."
        )


def check_dflash(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise a ValueError that names the config field in which a DFlash model does not fit the target.

    Args:
        model: the drafter's model.
        target: the model that generates.
    """
    config, target_config = model.config, text_config(target)
    check_block(config.block_size, config.mask_token_id, config.target_layer_ids, "assistant_model")
    if hasattr(target_config, "altup_num_inputs"):
        raise ValueError(
            f"assistant_model: a DFlash drafter reads one hidden state per layer, and the layers of "
            f"{type(target).__name__} return several (AltUp); choose a causal LM with the target's vocabulary, or None "
            "for prompt look-up."
        )
    num_layers = target_config.num_hidden_layers
    trained_for = getattr(config, "num_target_layers", None)
    vocab_size = getattr(config, "vocab_size", None)
    first_layer = -1 if isinstance(model, SpeculatorsDFlashModel) else 0  # -1 is the embedding's output
    outside = [layer for layer in config.target_layer_ids if not first_layer <= layer < num_layers]
    problem = None
    if config.hidden_size != target_config.hidden_size:
        problem = f"hidden_size is {config.hidden_size}, the target's {target_config.hidden_size}"
    elif outside:
        problem = f"target_layer_ids {outside} are outside the target's {num_layers} layers"
    elif trained_for not in (None, num_layers):
        problem = f"num_target_layers is {trained_for}, but the target has {num_layers}"
    elif vocab_size not in (None, target_config.vocab_size):
        problem = f"vocab_size is {vocab_size}, the target's {target_config.vocab_size}"
    elif not 0 <= config.mask_token_id < target.get_input_embeddings().weight.shape[0]:
        problem = f"mask_token_id {config.mask_token_id} is outside the target's embedding"
    elif target.get_output_embeddings() is None:
        problem = "head is the target's, which has none"
    if problem is not None:
        raise ValueError(
            f"assistant_model: this drafter was made for another target: its {problem}; load the drafter of this "
            "target."
        )


def check_causal_lm(model: PreTrainedModel, target: PreTrainedModel, n_tokens: int) -> None:
    """Raise a ValueError if a causal LM cannot draft for the target.

    Args:
        model: the drafter's model.
        target: the model that generates.
        n_tokens: the longest sequence of the request without padding, in tokens.
    """
    check_model(model, argument="assistant_model", recurrent=False)
    config, vocab_size = text_config(model), text_config(target).vocab_size
    if abs(config.vocab_size - vocab_size) > MAX_VOCAB_PADDING:
        raise ValueError(
            f"assistant_model: its vocabulary has {config.vocab_size} tokens, the target's {vocab_size}. Padding "
            f"explains a difference of at most {MAX_VOCAB_PADDING}, so it has another tokenizer; choose a drafter of "
            "the target's family, or None for prompt look-up."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if getattr(config, "rope_parameters", None) is None and positions is not None and n_tokens - 2 > positions:
        # the drafter never runs the last two tokens, because nothing is drafted after them
        raise ValueError(
            f"assistant_model: it has learned positions for {positions} tokens, and this request needs {n_tokens - 2}; "
            "lower max_new_tokens or choose another drafter."
        )


def check_attention(
    model: PreTrainedModel, request: Request, device: torch.device, model_kwargs: dict[str, Any]
) -> None:
    """Raise a ValueError if the user asked for the kernel and it cannot run.

    Args:
        model: the target.
        request: the request.
        device: the device of the inputs.
        model_kwargs: the keyword arguments that `generate` prepared for the forward.
    """
    if request.tree_attention == "triton":
        path_by_path = is_path_by_path(model, model_kwargs["cache"])
        problem = kernel_problem(model, device, model_kwargs["attention_mask"], path_by_path)
        if problem is not None:
            raise ValueError(f"tree_attention='triton' cannot run: {problem}; use 'auto' or 'sdpa'.")


def check_budget(model: PreTrainedModel, request: Request) -> None:
    """Raise a ValueError for an automatic budget where several processes would have to agree on times.

    Args:
        model: the target.
        request: the request.
    """
    if request.tree_budget == "auto" and (model.tp_size or 1) > 1:
        raise ValueError(
            "tree_budget='auto' depends on times, which differ between tensor-parallel ranks; pass a number of nodes."
        )
