"""The Triton kernel inside a model, in Triton's interpreter, and where it cannot run."""

import copy

import accelerate
import pytest
import torch
from helpers import random_ids
from transformers import DynamicCache

pytest.importorskip("triton", reason="needs Triton, which does not exist for macOS")

from hf_ddtree.kernels.tree_attention import tree_attention

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.target.attention import MaskedForward
from hf_ddtree.target.kernel_attention import KernelForward, choose_attention, on_gpu
from hf_ddtree.target.target import Target
from hf_ddtree.testing import WINDOW, ScriptedDrafter, tiny_model

CPU = torch.device("cpu")
TREE = DraftTree.from_lists([7, 8, 9, 10], [-1, 0, 0, 2])
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # fp32 rounding over 4 layers
# Layers with and without a window in one model. Each family marks them in its own way.
WINDOWS = {
    "llama": [None] * 4,
    "mistral": [WINDOW] * 4,
    "qwen3_windowed": [None, None, WINDOW, WINDOW],
    "gemma2": [WINDOW, None] * 2,
    "gemma3_text": [WINDOW, None] * 2,
    "gpt_oss": [WINDOW, None] * 2,
}


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def calls(monkeypatch):
    """Return the keyword arguments of every call of the kernel."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return tree_attention(*args, **kwargs)

    monkeypatch.setattr("hf_ddtree.kernels.tree_attention.tree_attention", spy)
    return calls


# a window, sinks, soft caps, keys and values of different widths, padding
@pytest.mark.parametrize("family", ["llama", "qwen3_windowed", "gemma2", "gpt_oss", "deepseek_v3"])
def test_attend_generates_what_plain_generate_does(family, calls):
    model = hf_ddtree.enable(tiny_model(family))
    prompt = random_ids(24)
    padded = {"input_ids": prompt, "attention_mask": (torch.arange(24) >= 20)[None].long()}
    for inputs in ({"input_ids": prompt}, padded):
        settings = {**inputs, "max_new_tokens": 12, "do_sample": False}
        plain = model.generate(**settings)
        drafter = ScriptedDrafter(plain[0].tolist(), seed=1)
        tree = model.generate(**settings, assistant_model=drafter, tree_budget=6, tree_attention="triton")
        assert torch.equal(plain, tree)
    n_layers = model.config.num_hidden_layers
    assert len(calls) >= 2 * n_layers and any(call["first_valid"] is not None for call in calls)


@pytest.mark.parametrize("family, windows", WINDOWS.items(), ids=WINDOWS)
@torch.no_grad()
def test_attend_gives_the_kernel_the_window_of_each_layer(family, windows, calls):
    """By the layer's index, and the logits are those of each node's own chain beyond the window."""
    model, tokens = tiny_model(family), random_ids(WINDOW + 6)[0]
    target = Target.after(model, tokens, KernelForward)
    with target.decoding():
        logits = target.verify([TREE]).logits[0]
    assert [call["window"] for call in calls] == windows
    for node in range(len(TREE)):
        chain = torch.cat([tokens, TREE.token_ids[TREE.path_to(node)]])[None]
        torch.testing.assert_close(logits[node], model(input_ids=chain).logits[0, -1], **TOLERANCE)


@torch.no_grad()
def test_attend_with_windows_swapped_between_layers_differs(monkeypatch):
    """The comparison above can fail."""
    model, tokens = tiny_model("gemma2"), random_ids(WINDOW + 6)[0]
    swapped = "hf_ddtree.target.kernel_attention.layer_window"
    monkeypatch.setattr(swapped, lambda config, layer_idx: [None, WINDOW][layer_idx % 2])
    target = Target.after(model, tokens, KernelForward)
    with target.decoding():
        logits = target.verify([TREE]).logits[0, 0]
    chain = torch.cat([tokens, TREE.token_ids[:1]])[None]
    assert (logits - model(input_ids=chain).logits[0, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("cached, first_valid", [(20, [3]), (10, None)])
def test_attend_counts_the_padding_that_a_layer_still_keeps(cached, first_valid, calls):
    """A sliding layer has dropped the first rows of 20, and with them the padding."""
    padding_mask = (torch.arange(21) >= 3)[None].long()
    forward = KernelForward(TREE, tiny_model("mistral").config, 20, padding_mask, None)
    query, states = torch.zeros(1, 4, 4, 16), torch.zeros(1, 2, cached + 4, 16)
    module = torch.nn.Module()
    module.layer_idx = 0
    output, weights = forward.attend(module, query, states, states, None)
    assert output.shape == (1, 4, 4, 16) and weights is None
    found = calls[0]["first_valid"]
    assert (None if found is None else found.tolist()) == first_valid


def test_attend_refuses_a_position_bias():
    forward = KernelForward(TREE, tiny_model("llama").config, 20, None, None)
    states = torch.zeros(1, 4, 4, 16)
    with pytest.raises(NotImplementedError, match="position bias"):
        forward.attend(None, states, states, states, None, position_bias=torch.zeros(1))


def test_masks_are_empty():
    forward = KernelForward(TREE, tiny_model("gemma2").config, 20, None, None)
    masks = forward.masks(DynamicCache(), CPU)
    assert set(masks) == {"sliding_attention", "full_attention"} and all(mask.numel() == 0 for mask in masks.values())


@pytest.mark.parametrize("family, names", [("llama", {"sdpa"}), ("gemma2", {"eager_attention_forward"})])
def test_patches_replace_sdpa_or_eager_attention(family, names):
    assert {patch.name for patch in KernelForward.patches(tiny_model(family))} == names


PROBLEMS = {
    "no triton": "pip install triton",
    "no GPU": "CUDA",
    "holes": "attention_mask",
    "own attention": "LlamaFor",
}


@pytest.mark.parametrize("situation, message", PROBLEMS.items(), ids=PROBLEMS)
def test_kernel_problem_says_why_the_kernel_cannot_run(situation, message, monkeypatch):
    model = hf_ddtree.enable(tiny_model("llama"))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    if situation == "no triton":
        monkeypatch.setattr("hf_ddtree.target.kernel_attention.find_spec", lambda name: None)
    elif situation == "no GPU":
        monkeypatch.setattr("hf_ddtree.target.kernel_attention._interpreted", lambda: False)
    elif situation == "holes":
        inputs["attention_mask"] = torch.tensor([[1, 0, 1]])
    else:
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(ValueError, match=f"tree_attention='triton' .*{message}"):
        model.generate(**inputs, max_new_tokens=3, tree_budget=4, tree_attention="triton")
    expected = hf_ddtree.disable(copy.deepcopy(model)).generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, tree_budget=4, do_sample=False), expected)


def test_kernel_problem_names_models_that_are_verified_path_by_path():
    model = hf_ddtree.enable(tiny_model("lfm2"))
    with pytest.raises(ValueError, match=r"tree_attention='triton' .*Lfm2.*path by path"):
        model.generate(random_ids(5), max_new_tokens=3, tree_budget=4, tree_attention="triton")


def test_choose_attention_takes_the_kernel_on_a_cpu_only_if_it_was_asked_for():
    chosen = {
        name: choose_attention(tiny_model("llama"), name, CPU, None, False) for name in ("auto", "sdpa", "triton")
    }
    assert chosen == {"auto": MaskedForward, "sdpa": MaskedForward, "triton": KernelForward}


@pytest.mark.parametrize("mask, attention", [([[0, 1, 1]], KernelForward), ([[1, 0, 1]], MaskedForward)])
def test_choose_attention_takes_the_kernel_on_a_gpu_where_it_can(mask, attention, monkeypatch):
    monkeypatch.setattr("hf_ddtree.target.kernel_attention.on_gpu", lambda model, device: True)
    assert choose_attention(tiny_model("llama"), "auto", CPU, torch.tensor(mask), path_by_path=False) is attention
    assert choose_attention(tiny_model("llama"), "auto", CPU, torch.tensor(mask), path_by_path=True) is MaskedForward


def test_on_gpu_is_false_for_a_model_that_runs_on_the_cpu():
    model = tiny_model("llama")
    assert not on_gpu(model, CPU) and not on_gpu(model, torch.device("cuda"))
    assert on_gpu(model.to("meta"), torch.device("cuda")), "offloaded weights move to the device of the inputs"


def test_choose_attention_of_an_offloaded_model_on_the_cpu():
    """Its weights are on "meta" while they are not needed."""
    model = hf_ddtree.enable(tiny_model("llama"))
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=10, do_sample=False)
    accelerate.cpu_offload(model, execution_device=CPU)
    assert torch.equal(model.generate(prompt, max_new_tokens=10, do_sample=False, tree_budget=4), expected)
