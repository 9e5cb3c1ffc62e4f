"""A tiny target, its data and a drafter trained for it, made once with the command line and shared by all tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ddtree.testing import VOCAB_SIZE, tiny_model
from hf_ddtree.training.__main__ import main

CHAT_TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """A folder with a target that a drafter can learn, its tokenizer, and prompts in `prompts.jsonl`.

    The target's embeddings are tied and not scaled, so its next token depends mostly on the last one.
    """
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", initializer_range=0.15, eos_token_id=2)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w4"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    prompts = [{"prompt": f"w{i} w{j}", "kind": f"kind {i % 2}"} for i in range(10, 60) for j in (70, 80)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def run_command(target_folder) -> Callable[..., None]:
    """A function that runs one training command on the target, in fp32."""

    def run(command: str, **options: Any) -> None:
        arguments = [command, "--model", str(target_folder), "--dtype", "float32"]
        for name, value in options.items():
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
        main(arguments)

    return run


@pytest.fixture(scope="session")
def generate_settings(target_folder) -> dict[str, Any]:
    """The options of `generate`, except the folder and the number of shards."""
    return {"prompts": target_folder / "prompts.jsonl", "shard_size": 50, "max_new_tokens": 24, "batch_size": 50}


@pytest.fixture(scope="session")
def data(tmp_path_factory, run_command, generate_settings) -> Path:
    """A folder with 4 shards of 50 sequences."""
    folder = tmp_path_factory.mktemp("data")
    run_command("generate", output=folder, shards=4, **generate_settings)
    return folder


@pytest.fixture(scope="session")
def train_settings(data) -> dict[str, Any]:
    """The options of `train`, except the output folder."""
    return {
        "data": data,
        "steps": 60,
        "evaluate_every": 20,
        "batch_size": 8,
        "anchors": 8,
        "block_size": 4,
        "num_layers": 1,
        "layer_ids": [0, 2, 3],
        "held_out": 8,
        "frequent": 20,
        "negatives": 30,
        "mixed_precision": "no",
        "learning_rate": 1e-2,
        "warmup": 5,
        "mask_token_id": 3,
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory, run_command, train_settings) -> Path:
    """The output folder of a whole training run. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("trained")
    run_command("train", output=folder, **train_settings)
    return folder
