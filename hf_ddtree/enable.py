"""`enable(model)`: how tree decoding plugs into `generate`, and what one call decides.

    generate(...)                          of transformers. Ours holds back the streamer's prompt first
      _prepare_generation_config(...)      takes the tree options, checks the settings
      _validate_generation_mode(...)       checks the model and the arguments
      _assisted_decoding(...), _sample(...)    check the inputs, resolve the Request, build
                                           target, drafter and budget, and run generate.decode

Each hook calls the model's own one when no tree was asked for.
"""

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from . import checks
from .adapters import check_adapters, inside_wrapper
from .budget.budget import make_budget
from .drafters.base import Drafter
from .drafters.choose import choose_drafter
from .drafters.context import keep_context, take_context
from .generate import decode
from .output import GenerateDDTreeOutput, Recorder
from .request import DEFAULT_LOOKUP_DEPTH, DEFAULT_LOOKUP_MATCH, TREE_OPTIONS, Request, TreeConfig
from .sampling.policies import POLICIES
from .streamer import HeldStreamer
from .target.kernel_attention import choose_attention
from .target.path_verifier import is_path_by_path
from .target.prefill import with_default_positions
from .target.selfcheck import check_tree_forward
from .target.target import Target
from .walk import Emitter, count_padding


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model.generate` take the tree options, and return the model.

    The model's class becomes a subclass of the same name. Its `generate` decodes with a tree when `tree_budget` is
    given and is plain otherwise. Weights, hooks and attributes stay as they are, and pickle and deepcopy work. A second
    call changes nothing.

    Args:
        model: a decoder-only causal LM.

    Raises:
        ValueError: if tree decoding cannot work for this kind of model. The message names the obstacle.

    Example:
        >>> hf_ddtree.enable(model)
        >>> output = model.generate(**inputs, assistant_model=drafter, tree_budget=64)
    """
    checks.check_class(model)
    if isinstance(model, TreeGenerationMixin):
        return model
    checks.check_model(model)
    original: Any = type(model)
    model.__class__ = _enabled_class(original)
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model its own class back, and return the model. A second call changes nothing.

    Args:
        model: a model, enabled or not.

    Example:
        >>> hf_ddtree.disable(model)
    """
    if isinstance(model, TreeGenerationMixin):
        model.__class__ = _original_class(type(model))
    return model


if TYPE_CHECKING:  # the mixin always stands before a model class

    class _Model(PreTrainedModel, GenerationMixin):
        pass
else:
    _Model = object


class TreeGenerationMixin(_Model):
    """The hooks of `generate` that tree decoding overrides. Each calls the model's own one when no tree was asked for.

    The tree options are attributes of the call's generation config, where transformers keeps every other setting. A
    user's `GenerationConfig(tree_budget=64)` has them there, too.
    """

    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        if kwargs.get("streamer") is not None and _has_budget(self, args, kwargs):
            kwargs["streamer"] = HeldStreamer(kwargs["streamer"])
        return super().generate(*args, **kwargs)

    def _prepare_generation_config(self, generation_config=None, **kwargs):
        options = {name: kwargs.pop(name) for name in TREE_OPTIONS if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if "tree_budget" in options and options["tree_budget"] is None:
            # a plain call, so the other tree options of the settings do not apply either
            options = {**dict.fromkeys(TREE_OPTIONS), **options}
        for name, value in options.items():
            setattr(generation_config, name, value)  # a copy that serves this call only
        tree_config = _tree_config(generation_config)
        if tree_config is not None:
            checks.check_tree_config(tree_config)
            # checked this early, because some settings make `generate` leave for another implementation
            checks.check_settings(generation_config)
            checks.check_returned(tree_config, generation_config)
        return generation_config, model_kwargs

    def load_custom_generate(self, *args, **kwargs):
        """Load a decoding loop from the Hub, unless a tree was asked for."""
        if kwargs.get("tree_budget") is not None:
            checks.refuse_custom_generate()
        return super().load_custom_generate(*args, **kwargs)

    def init_continuous_batching(self, generation_config=None, *args, **kwargs):
        """Return a manager of continuous batching, unless a tree was asked for."""
        checks.check_continuous_batching(generation_config or self.generation_config, kwargs)
        return super().init_continuous_batching(generation_config, *args, **kwargs)

    def continuous_batching_context_manager(self, generation_config=None, *args, **kwargs):
        """Return the context of such a manager, unless a tree was asked for."""
        checks.check_continuous_batching(generation_config or self.generation_config, kwargs)
        return super().continuous_batching_context_manager(generation_config, *args, **kwargs)

    def generate_batch(self, inputs, generation_config=None, *args, **kwargs):
        """Generate by continuous batching, unless a tree was asked for."""
        checks.check_continuous_batching(generation_config or self.generation_config, kwargs)
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if _tree_config(generation_config) is None:
            checks.check_plain_arguments(generation_config, generation_mode_kwargs)
            return super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        checks.check_model(self)
        check_adapters(self)
        checks.check_arguments(generation_mode_kwargs)
        checks.check_speculation(generation_config, generation_mode_kwargs.get("assistant_model"))

    def _sample(self, input_ids, **kwargs):
        # `generate` comes here, for greedy decoding too, if there is no assistant_model
        tree_config = _tree_config(kwargs["generation_config"])
        if tree_config is None:
            return super()._sample(input_ids, **kwargs)
        return _tree_decoding(self, input_ids, tree_config, **kwargs)

    def _assisted_decoding(self, input_ids, **kwargs):
        tree_config = _tree_config(kwargs["generation_config"])
        if tree_config is None:
            return super()._assisted_decoding(input_ids, **kwargs)
        return _tree_decoding(self, input_ids, tree_config, **kwargs)

    def __reduce_ex__(self, protocol):
        # pickle finds the class by name, and that name belongs to the class from which the enabled one was derived
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_enabled, (_original_class(type(self)),), *state


def _has_budget(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `generate` has a `tree_budget`, as an argument or in the settings that apply to it."""
    if "tree_budget" in kwargs:
        return kwargs["tree_budget"] is not None
    passed = args[1] if len(args) > 1 else kwargs.get("generation_config")
    return any(getattr(settings, "tree_budget", None) is not None for settings in (passed, model.generation_config))


def _tree_config(generation_config: GenerationConfig) -> TreeConfig | None:
    """Return the tree options among the settings of a call, or None for a plain call."""
    options = {name: value for name in TREE_OPTIONS if (value := getattr(generation_config, name, None)) is not None}
    if "tree_budget" not in options:
        checks.check_options([name for name, value in options.items() if value is not False])
        return None
    return TreeConfig(**options)


def resolve_request(tree_config: TreeConfig, settings: GenerationConfig) -> Request:
    """Return the resolved settings of a call. The decoding loop reads these instead of transformers' settings.

    Args:
        tree_config: the tree options of the call.
        settings: the settings that transformers prepared for it.
    """
    return_dict = bool(settings.return_dict_in_generate)
    return Request(
        tree_budget=tree_config.tree_budget,
        tree_attention=tree_config.tree_attention,
        trace=tree_config.tree_trace,
        timing=tree_config.tree_timing,
        policy=POLICIES[tree_config.tree_sampling if settings.do_sample else "target"],
        do_sample=settings.do_sample,
        temperature=settings.temperature if settings.do_sample else 0.0,
        warpers=_stateless_warpers(settings) if settings.do_sample else LogitsProcessorList(),
        max_length=settings.max_length,
        lookup_depth=settings.prompt_lookup_num_tokens or DEFAULT_LOOKUP_DEPTH,
        lookup_match=settings.max_matching_ngram_size or DEFAULT_LOOKUP_MATCH,
        return_dict=return_dict,
        keep_scores=return_dict and bool(settings.output_scores),
        keep_logits=return_dict and bool(settings.output_logits),
        keep_hidden_states=return_dict and bool(settings.output_hidden_states),
        generation_config=settings,
    )


def _stateless_warpers(settings: GenerationConfig) -> LogitsProcessorList:
    """Return temperature, top-k, top-p and min-p as transformers applies them, in its order."""
    warpers = LogitsProcessorList()
    if settings.temperature not in (None, 0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p is not None:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers


def _tree_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    tree_config: TreeConfig,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | Drafter | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer=None,
    assistant_tokenizer=None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GenerateDDTreeOutput | torch.Tensor:
    """Decode with a tree. The arguments are those that `generate` hands to its decoding methods."""
    assistant_model = inside_wrapper(assistant_model)
    model_kwargs = with_default_positions(model, input_ids, {"attention_mask": None, **model_kwargs})
    request, device = resolve_request(tree_config, generation_config), input_ids.device
    checks.check_inputs(model, input_ids, request.max_length, model_kwargs)
    n_padding = count_padding(input_ids, model_kwargs["attention_mask"])
    checks.check_assistant(assistant_model, model, request.max_length - n_padding)
    checks.check_attention(model, request, device, model_kwargs)
    checks.check_budget(model, request)

    context = take_context(assistant_model, input_ids, model_kwargs)
    drafter = choose_drafter(assistant_model, model, request, context)
    mask, path_by_path = model_kwargs["attention_mask"], is_path_by_path(model, model_kwargs["cache"])
    attention = choose_attention(model, request.tree_attention, device, mask, path_by_path)
    check_tree_forward(model, device, attention)
    if isinstance(streamer, HeldStreamer):
        streamer = streamer.release()
    target = Target(model, model_kwargs, attention, drafter.taps)
    budget = make_budget(request, target, assistant_model, input_ids.shape[1])
    emitter = Emitter.from_request(request, input_ids, logits_processor, stopping_criteria, streamer, mask)
    recorder = Recorder(request, device)

    decode(target, drafter, budget, [emitter], recorder, request)
    keep_context(context, assistant_model, emitter.input_ids, target.model_kwargs)
    if streamer is not None:
        streamer.end()
    return recorder.output(emitter, target.cache)


@cache
def _enabled_class(base: Any) -> type:
    # saved configs, output recording and error messages use these names
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (TreeGenerationMixin, base), names)


def _original_class(enabled: type) -> type:
    """Return the class from which an enabled class, or an ancestor of it, was derived."""
    made = next(ancestor for ancestor in enabled.__mro__ if TreeGenerationMixin in ancestor.__bases__)
    return made.__bases__[1]


def _new_enabled(base: type) -> PreTrainedModel:
    enabled: Any = _enabled_class(base)
    return enabled.__new__(enabled)
