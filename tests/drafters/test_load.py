"""load_drafter on checkpoints in the published layouts, which this file writes, and on broken ones."""

import json

import pytest
import torch
from helpers import generate, write_speculators_drafter
from safetensors.torch import load_file, save_file

import hf_ddtree
from hf_ddtree import DFlashDraftModel, load_drafter
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model, tiny_muse_glimmer_drafter

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture
def target():
    return hf_ddtree.enable(tiny_model("llama"))


@pytest.fixture
def checkpoint(target, tmp_path):
    """Write a z-lab v1 checkpoint as published, field by field, and return its folder."""
    weights = tiny_dflash_drafter(target).state_dict()
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 5,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": 128,
    }
    return write(tmp_path, config, weights)


def assert_equals_plain(target, drafter):
    """Assert that the target generates its own text with the drafter."""
    settings = {"max_new_tokens": 8, "do_sample": False}
    plain = generate(target, PROMPT, **settings)
    assert torch.equal(plain, generate(target, PROMPT, assistant_model=drafter, tree_budget=8, **settings))


def write(path, config, weights):
    """Write a checkpoint into a folder, and return the folder."""
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in weights.items()}, path / "model.safetensors")
    # code in a checkpoint must never run
    (path / "dflash.py").write_text("raise SystemExit('remote code ran')")
    return path


def edit(path, weights=None, **fields):
    """Change the config fields of a checkpoint (None deletes a field) and its weights in place."""
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in fields}
    config = kept | {name: value for name, value in fields.items() if value is not None}
    state = load_file(path / "model.safetensors")
    if weights:
        weights(state)
    return write(path, config, state)


def test_load_drafter_of_the_z_lab_layout_generates(checkpoint, target):
    drafter = load_drafter(checkpoint, dtype=torch.float32)
    assert isinstance(drafter, DFlashDraftModel) and not drafter.training
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 3, [0, 2])
    assert config.rope_parameters["rope_theta"] == 10000
    for name, value in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(drafter.state_dict()[name], value), name
    assert_equals_plain(target, drafter)


def test_load_drafter_reads_the_block_size_of_later_checkpoints(checkpoint):
    fields = {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 7}
    assert load_drafter(edit(checkpoint, block_size=None, dflash_config=fields)).config.block_size == 7


def test_load_drafter_after_save_pretrained_keeps_layout_and_values(checkpoint, tmp_path):
    drafter = load_drafter(checkpoint)
    drafter.save_pretrained(tmp_path / "copy")
    saved = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert saved["architectures"] == ["DFlashDraftModel"] and saved["model_type"] == "qwen3"
    assert saved["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]} and saved["block_size"] == 5
    again = load_drafter(tmp_path / "copy")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_load_drafter_of_muse_glimmer_and_causal_lm_generates(target, tmp_path):
    tiny_muse_glimmer_drafter(target).save_pretrained(tmp_path / "muse")
    target.save_pretrained(tmp_path / "lm")
    for name in ("muse", "lm"):
        assert_equals_plain(target, load_drafter(tmp_path / name))


def remove_fc(state):
    del state["fc.weight"]


def add_convolution(state):
    state["layers.0.conv.weight"] = torch.zeros(3)


def shrink_fc(state):
    state["fc.weight"] = state["fc.weight"][:, :-1]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel'"),
        ({"architectures": ["Qwen3DSparkModel"]}, "architecture 'Qwen3DSparkModel'"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "architecture 'BertForMaskedLM'"),
        ({"architectures": None}, r"architecture '\(none\)'"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks dflash_config.mask_token_id"),
        ({"block_size": None}, "block_size of at least 2.*None"),
        ({"block_size": 1}, "block_size of at least 2.*1"),
        ({"dflash_config": {"mask_token_id": 3}, "num_target_layers": None}, "neither dflash_config.target_layer_ids"),
        ({"weights": remove_fc}, "1 missing keys .*fc.weight"),
        ({"weights": add_convolution}, "1 unexpected keys .*layers.0.conv.weight"),
        ({"weights": shrink_fc}, "fc.weight"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "11 missing keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_load_drafter_names_what_does_not_fit(change, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_drafter(edit(checkpoint, **change))


def test_load_drafter_refuses_pickled_weights(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "was.safetensors")
    torch.save({}, checkpoint / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"path_or_repo_id: model\.safetensors of '.*' cannot be read"):
        load_drafter(checkpoint)


@pytest.mark.parametrize("kind", [None, "", 5, "a model"], ids=str)
def test_load_drafter_refuses_what_is_no_name(target, kind):
    name = {"a model": target}.get(kind, kind)
    shown = "an empty name" if name == "" else f"a {type(name).__name__}"
    with pytest.raises(ValueError, match=f"path_or_repo_id: .*a folder or a Hub id, not {shown}.*assistant_model"):
        load_drafter(name)


# the name that is passed, relative to a folder of the test, and what the error must say about it
MISSING = {
    "absolute": ("{folder}/none", "is no folder"),
    "relative": ("./none", "is no folder"),
    "home": ("~/none", "is no folder"),
    "too many parts": ("a/b/c", "is no folder"),
    "a file": ("{folder}/config.json", "is a file"),
    "an empty folder": ("{folder}/empty", "holds no config.json"),
    "a Hub id": ("no-owner/no-drafter", "the Hub gave no config.json for this id"),
    "a short Hub id": ("no-drafter", "the Hub gave no config.json for this id"),
    "no Hub id": ("it's none!", "the Hub gave no config.json for this id"),
}


@pytest.mark.parametrize("name, problem", MISSING.values(), ids=MISSING)
def test_load_drafter_names_what_it_does_not_find(checkpoint, monkeypatch, name, problem):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (checkpoint / "empty").mkdir()
    passed = name.format(folder=checkpoint)
    with pytest.raises(OSError, match=rf"^path_or_repo_id: .*'{passed}'.*{problem}.*; ") as failure:
        load_drafter(passed)
    assert "\n" not in str(failure.value) and '"' not in str(failure.value)


@pytest.mark.parametrize("content", ["{", "", "[1]"])
def test_load_drafter_refuses_a_broken_config(checkpoint, content):
    (checkpoint / "config.json").write_text(content)
    with pytest.raises(OSError, match=r"^path_or_repo_id: config\.json of "):
        load_drafter(checkpoint)


def test_load_drafter_refuses_broken_weights(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"{")
    with pytest.raises(OSError, match=r"^path_or_repo_id: model\.safetensors of '.*' cannot be read"):
        load_drafter(checkpoint)


QUANTISED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("layout", ["z-lab", "speculators", "Muse-Glimmer"])
@pytest.mark.parametrize("where", ["config", "argument"])
def test_load_drafter_refuses_to_quantise_a_dflash_drafter(checkpoint, target, tmp_path, layout, where):
    folder = {"z-lab": checkpoint, "speculators": tmp_path / "speculators", "Muse-Glimmer": tmp_path / "muse"}[layout]
    folder.mkdir(exist_ok=True)
    if layout == "speculators":
        write_speculators_drafter(folder, target)
    elif layout == "Muse-Glimmer":
        tiny_muse_glimmer_drafter(target).save_pretrained(folder)
    arguments = {"quantization_config": QUANTISED}
    if where == "config":
        edit(folder, **arguments)
        arguments = {}
    with pytest.raises(ValueError, match=r"quantization_config: .*DFlash drafter, which cannot be quantised.*; load"):
        load_drafter(folder, **arguments)
    assert load_drafter(edit(folder, quantization_config=None), quantization_config=None)


def test_load_drafter_refuses_remote_code(checkpoint):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_drafter(checkpoint, trust_remote_code=True)
