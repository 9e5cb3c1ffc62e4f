"""`enable(model)` and the decoding loop: prefill, then draft, verify, walk and commit until the text ends."""

from functools import cache

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from .attention import choose_kernel
from .budget import make_budget
from .config import TREE_OPTIONS, TreeConfig, check_inputs, check_mode_kwargs, check_model, check_settings
from .drafters import draft_tree, tree_candidate_generator
from .drafters.prompt_lookup import DEFAULT_DEPTH
from .output import GenerateDDTreeOutput, Recorder
from .selfcheck import check_tree_attention
from .verify import count_padding, deepest_node, is_path_by_path, prefill, tap, tree_verifier
from .walk import Emitter, walk_tree


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Teach `model.generate` the tree options; returns the model.

    Its class becomes a subclass of the same name whose `generate` decodes with a tree when `tree_budget` is given and
    is plain otherwise. Weights, hooks and attributes are untouched; pickle and deepcopy work. Idempotent.

    Args:
        model: a decoder-only causal LM.

    Raises:
        ValueError: if tree decoding cannot work for this kind of model, naming what is in the way.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ValueError(
            f"model: hf_ddtree.enable takes a transformers causal LM, not a {type(model).__name__}. For a wrapped model "
            "(PEFT, torch.compile) enable the model inside, e.g. hf_ddtree.enable(peft_model.get_base_model())."
        )
    if isinstance(model, TreeGenerationMixin):
        return model
    check_model(model)
    model.__class__ = _enabled_class(type(model))
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give `model` its own class back; returns the model. Idempotent.

    Args:
        model: enabled or not.
    """
    if isinstance(model, TreeGenerationMixin):
        model.__class__ = _original_class(type(model))
    return model


class TreeGenerationMixin:
    """The hooks of `generate` that tree decoding overrides; each falls through when no tree was asked for."""

    def _prepare_generation_config(self, generation_config=None, **kwargs):
        options = {name: kwargs.pop(name, None) for name in TREE_OPTIONS}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name in TREE_OPTIONS:
            if options[name] is None:
                options[name] = getattr(generation_config, name, None)
        tree_config = TreeConfig.from_options(options)
        # on this call's own copy of the settings, where transformers keeps such things too
        generation_config._tree_config = tree_config
        if tree_config is not None:
            # this early, because some settings make `generate` leave for another implementation
            check_settings(generation_config)
            if generation_config.prompt_lookup_num_tokens is None:
                # makes it a request for assisted generation even without an assistant_model
                generation_config.prompt_lookup_num_tokens = DEFAULT_DEPTH
        return generation_config, model_kwargs

    def load_custom_generate(self, *args, **kwargs):
        if kwargs.get("tree_budget") is not None:
            raise ValueError("custom_generate replaces the decoding loop; drop it, or drop tree_budget.")
        return super().load_custom_generate(*args, **kwargs)

    def generate_batch(self, inputs, generation_config=None, **kwargs):
        settings = generation_config or self.generation_config
        if "tree_budget" in kwargs or getattr(settings, "tree_budget", None) is not None:
            raise ValueError("tree_budget: generate_batch decodes without a tree; drop it, or call generate per sequence.")
        return super().generate_batch(inputs, generation_config=generation_config, **kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_config._tree_config is None:
            return super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        check_model(self)
        check_mode_kwargs(generation_mode_kwargs)

    def _assisted_decoding(self, input_ids, **kwargs):
        if kwargs["generation_config"]._tree_config is None:
            return super()._assisted_decoding(input_ids, **kwargs)
        return _tree_decoding(self, input_ids, **kwargs)

    def __reduce_ex__(self, protocol):
        # by name, the class of this object is the one it was derived from
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_enabled, (_original_class(type(self)),), *state


@cache
def _enabled_class(base: type) -> type:
    # saved configs, output recording and error messages go by these names
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (TreeGenerationMixin, base), names)


def _original_class(enabled: type) -> type:
    """The class that `enabled`, or a class it derives from, was made of."""
    made = next(ancestor for ancestor in enabled.__mro__ if TreeGenerationMixin in ancestor.__bases__)
    return made.__bases__[1]


def _new_enabled(base: type) -> PreTrainedModel:
    enabled = _enabled_class(base)
    return enabled.__new__(enabled)


def _tree_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer=None,
    synced_gpus: bool = False,
    **model_kwargs,
) -> GenerateDDTreeOutput | torch.Tensor:
    """Generate as plain `generate` does, with several tokens per target forward.

    The arguments are those `generate` hands to its decoding methods.
    """
    check_inputs(model, input_ids, generation_config, model_kwargs)
    options = generation_config._tree_config
    drafter = tree_candidate_generator(assistant_model, model, generation_config, options.policy)
    cache = model_kwargs["cache"]
    device, path_by_path = input_ids.device, is_path_by_path(model, cache)
    use_kernel = choose_kernel(model, options.tree_attention, device, model_kwargs, path_by_path)
    check_tree_attention(model, device, use_kernel)
    budget = make_budget(options.tree_budget, model, assistant_model, generation_config, input_ids, use_kernel)

    emitter = Emitter.from_config(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    recorder = Recorder(options, generation_config, input_ids.device)
    padding = count_padding(input_ids, model_kwargs["attention_mask"])

    outputs, context = prefill(model, input_ids, generation_config, model_kwargs, drafter.tapped_states)
    drafter.prefill(*context)
    recorder.add_hidden_states(outputs, rows=slice(None))
    emitter.emit(outputs.logits[:, -1])
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    cache = model_kwargs["cache"]

    with tree_verifier(model, cache, use_kernel, drafter.tapped_states) as verifier, model._optimize_model_for_decode():
        while not emitter.finished:
            room = generation_config.max_length - emitter.input_ids.shape[1] - 1
            max_depth = deepest_node(model, room, model_kwargs["position_ids"])
            with recorder.stage("draft"):
                tree = draft_tree(drafter, emitter.input_ids[:, padding:], budget, max_depth)
            with recorder.stage("verify"):
                outputs = verifier.verify_tree(tree, model_kwargs)
            with recorder.stage("walk"):
                path = walk_tree(tree, outputs.logits, emitter)
            with recorder.stage("commit"):
                verifier.commit_path(path)
                drafter.observe(emitter.take_overlaps())
                if not emitter.finished:
                    drafter.commit_path(tree.drafted_nodes(path), tap(outputs, drafter.tapped_states, rows=path))
                model_kwargs = model._update_model_kwargs_for_generation(
                    outputs, model_kwargs, num_new_tokens=len(path)
                )
            budget.observe(tree, path)
            recorder.add_round(tree, path, outputs)

    if streamer is not None:
        streamer.end()
    return recorder.output(emitter, cache)
