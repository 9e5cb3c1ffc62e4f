"""Targets and drafters that PEFT has changed."""

import pytest
import torch
from helpers import assert_refused, generate, random_ids

import hf_ddtree
from hf_ddtree.adapters import inside_wrapper
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, truncated_copy

# peft uses an older name of a transformers attribute
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
peft = pytest.importorskip("peft", reason="needs peft, which `make test` installs")

PROMPT = random_ids(12)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
IN_THE_LAYERS = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
}
TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
CPT = {"cpt_token_ids": [4, 5], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}
PROMPT_LEARNING = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(**TOKENS),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(**TOKENS),
    "P_TUNING": lambda: peft.PromptEncoderConfig(**TOKENS),
    "MULTITASK_PROMPT_TUNING": lambda: peft.MultitaskPromptTuningConfig(**TOKENS),
    "CPT": lambda: peft.CPTConfig(task_type="CAUSAL_LM", **CPT),
}


def adapted(model, make_config):
    torch.manual_seed(0)
    return peft.get_peft_model(model, make_config()).eval()


@pytest.mark.parametrize("make_config", IN_THE_LAYERS.values(), ids=IN_THE_LAYERS)
def test_generate_of_an_adapted_target_equals_plain(make_config):
    base = tiny_model("llama")
    without_adapter = generate(base, PROMPT, max_new_tokens=10)
    wrapper = adapted(base, make_config)
    plain = wrapper.generate(input_ids=PROMPT, max_new_tokens=10)
    assert plain.tolist() != without_adapter.tolist()
    assert_refused(r"get_base_model\(\)", hf_ddtree.enable, wrapper)
    hf_ddtree.enable(wrapper.get_base_model())
    for drafter in [None, tiny_dflash_drafter(base), wrapper]:
        options = {"tree_budget": 8, "assistant_model": drafter, "return_dict_in_generate": True}
        output = wrapper.generate(input_ids=PROMPT, max_new_tokens=10, **options)
        assert output.sequences.tolist() == plain.tolist() and output.rounds


@pytest.mark.parametrize("method", PROMPT_LEARNING)
def test_check_adapters_refuses_prompt_learning_by_name(method):
    wrapper = adapted(tiny_model("llama"), PROMPT_LEARNING[method])
    hf_ddtree.enable(wrapper.get_base_model())
    options = {"input_ids": PROMPT, "max_new_tokens": 4, "tree_budget": 8}
    assert_refused(f"model: PEFT's {method} .*without tree_budget", wrapper.generate, **options)
    # the base model alone has no virtual tokens
    plain = generate(wrapper.get_base_model(), PROMPT, max_new_tokens=4)
    assert generate(wrapper.get_base_model(), PROMPT, max_new_tokens=4, tree_budget=8).tolist() == plain.tolist()


def test_check_adapters_refuses_an_activated_lora():
    """It adapts the last tokens of every forward, so most nodes of a tree would go without it."""
    invocation = PROMPT[0, -2:].tolist()
    make_config = lambda: peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=invocation, **LORA)  # noqa: E731
    wrapper = adapted(tiny_model("llama"), make_config)
    hf_ddtree.enable(wrapper.get_base_model())
    options = {"input_ids": PROMPT, "max_new_tokens": 4, "tree_budget": 8}
    assert_refused("model: the adapter 'default' is an activated LoRA", wrapper.generate, **options)


@pytest.mark.parametrize("make_config", IN_THE_LAYERS.values(), ids=IN_THE_LAYERS)
def test_inside_wrapper_lets_an_adapted_causal_lm_draft(make_config):
    target = hf_ddtree.enable(tiny_model("llama"))
    wrapper = adapted(truncated_copy(target, 3), make_config)
    plain = generate(target, PROMPT, max_new_tokens=10)
    settings = {"max_new_tokens": 10, "tree_budget": 8, "return_dict_in_generate": True}
    outputs = [
        generate(target, PROMPT, assistant_model=model, **settings) for model in (wrapper, truncated_copy(target, 3))
    ]
    assert all(output.sequences.tolist() == plain.tolist() for output in outputs)
    # with the adapter, the drafter accepts other tokens
    rounds = [[round.accepted_length for round in output.rounds] for output in outputs]
    assert rounds[0] != rounds[1]


def test_inside_wrapper_lets_an_adapted_dflash_model_draft():
    target = hf_ddtree.enable(tiny_model("llama"))
    config = peft.LoraConfig(**LORA)
    wrapper = adapted(tiny_dflash_drafter(target), lambda: config)
    plain = generate(target, PROMPT, max_new_tokens=10)
    assert (
        generate(target, PROMPT, max_new_tokens=10, assistant_model=wrapper, tree_budget=8).tolist() == plain.tolist()
    )


@pytest.mark.parametrize("method", PROMPT_LEARNING)
def test_inside_wrapper_refuses_prompt_learning_by_name(method):
    target = hf_ddtree.enable(tiny_model("llama"))
    wrapper = adapted(truncated_copy(target, 3), PROMPT_LEARNING[method])
    options = {"max_new_tokens": 4, "tree_budget": 8, "assistant_model": wrapper}
    assert_refused(f"assistant_model: PEFT's {method} .*get_base_model", target.generate, PROMPT, **options)


def test_inside_wrapper_returns_everything_else_as_it_is():
    model = tiny_model("llama")
    for other in (None, "a path", model, torch.nn.Linear(2, 2)):
        assert inside_wrapper(other) is other
