"""Targets that are spread over devices and processes by accelerate and transformers, and quantised targets."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import generate, random_ids, scripted
from transformers import AutoModelForCausalLM, TorchAoConfig

import hf_ddtree
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

PROMPT = random_ids(20, seed=1)
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "seed": 3}
PARTS = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "model.rotary_emb", "lm_head"]
OFFLOADED = {
    "inner layers": ["model.layers.1", "model.layers.2"],
    "last layer and head": ["model.layers.3", "model.norm", "lm_head"],
    "everything": PARTS,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected():
    """Return the greedy and the sampled text of the model in memory."""
    model = tiny_model("llama")
    return generate(model, PROMPT, **GREEDY), generate(model, PROMPT, **SAMPLED)


@pytest.mark.parametrize("drafter", ["prompt look-up", "DFlash", "causal LM", "itself"])
@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_generate_equals_plain_decoding_with_layers_on_disk(offloaded, drafter, folder, expected, tmp_path):
    device_map = {part: "disk" if part in OFFLOADED[offloaded] else "cpu" for part in PARTS}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path).eval()
    hf_ddtree.enable(model)
    makers = {
        "prompt look-up": lambda: None,
        "DFlash": lambda: tiny_dflash_drafter(tiny_model("llama")),
        "causal LM": lambda: tiny_model("llama"),
        "itself": lambda: model,
    }
    options = {"assistant_model": makers[drafter](), "tree_budget": 8, "tree_sampling": "target"}
    assert torch.equal(generate(model, PROMPT, **options, **GREEDY), expected[0])
    assert torch.equal(generate(model, PROMPT, **options, **SAMPLED), expected[1])


RANK = """
    import json, sys
    import torch
    import hf_ddtree
    from helpers import generate, random_ids
    from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
    from transformers import AutoModelForCausalLM

    model = hf_ddtree.enable(AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval())
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "DTensor"
    prompt = random_ids(20, seed=1)
    texts = {}
    for drafter in (None, tiny_dflash_drafter(model), tiny_model("llama")):
        for sampling in ("greedy", "target", "hybrid", "swor"):
            mode = {"do_sample": False} if sampling == "greedy" else {"do_sample": True, "tree_sampling": sampling}
            options = {"max_new_tokens": 24, "assistant_model": drafter, "tree_budget": 8}
            text = generate(model, prompt, seed=3, **options, **mode)
            texts[f"{type(drafter).__name__} {sampling}"] = text.tolist()
    with open(f"{sys.argv[2]}/{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(texts, file)
"""


def test_generate_walks_identically_on_two_ranks(folder, expected, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        str(script),
        str(folder),
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(launch, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(ranks[0]) == 12 and ranks[0] == ranks[1]
    for name, text in ranks[0].items():
        if name.endswith("greedy"):
            assert text == expected[0].tolist()
        if name.endswith("target"):
            assert text == expected[1].tolist()


def test_generate_equals_plain_decoding_with_int8_weights(folder):
    """Only weights are quantised. Activations keep their precision, so a tree forward rounds like any other."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = hf_ddtree.enable(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    plain = generate(model, PROMPT, **GREEDY)
    for drafter in (None, scripted(plain, hit_rate=0.8), tiny_dflash_drafter(tiny_model("llama"))):
        output = generate(model, PROMPT, assistant_model=drafter, tree_budget=8, **GREEDY)
        assert torch.equal(output, plain)
