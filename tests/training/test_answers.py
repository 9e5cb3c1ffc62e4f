"""Generating training data."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree.training import answers as answers_module
from hf_ddtree.training.answers import answer, generate_shards
from hf_ddtree.training.config import GenerateConfig
from hf_ddtree.training.data import read_shards, shard_path


@pytest.fixture(scope="module")
def target(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)


def test_answer_equals_plain_generate_up_to_the_end(target, tmp_path):
    """Batches are padded on the left, and what follows the end token is cut off."""
    model, _ = target
    prompts = [[10 + i] * (1 + i % 4) for i in range(9)]
    config = GenerateConfig(output=tmp_path, batch_size=4, max_new_tokens=16)
    sequences = answer(model, prompts, config, {"do_sample": False})
    assert sorted(s.tokens[: s.prompt_length].tolist() for s in sequences) == sorted(prompts)
    for sequence in sequences:
        prompt = sequence.tokens[None, : sequence.prompt_length]
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16)
        assert sequence.tokens.tolist() == plain[0].tolist()
        assert sequence.temperature == 0


def test_generate_shards_keeps_existing_shards(run_command, generate_settings, data, tmp_path):
    run_command("generate", output=tmp_path, shards=2, **generate_settings)
    first = shard_path(tmp_path, 0).read_bytes()
    modified = shard_path(tmp_path, 0).stat().st_mtime_ns
    run_command("generate", output=tmp_path, shards=4, **generate_settings)
    assert shard_path(tmp_path, 0).stat().st_mtime_ns == modified
    assert shard_path(tmp_path, 0).read_bytes() == first and len(read_shards(tmp_path)) == 200
    for sequence, expected in zip(read_shards(tmp_path), read_shards(data), strict=True):
        assert torch.equal(sequence.tokens, expected.tokens)  # a shard is a function of its seed


def test_generate_shards_answers_a_fraction_greedily(data):
    sequences = read_shards(data)[:50]
    assert [sequence.temperature for sequence in sequences].count(0) == round(0.67 * 50)
    assert {round(sequence.temperature, 3) for sequence in sequences} == {0.0, 0.7}


def test_generate_shards_lets_the_target_write_prompts(target, tmp_path):
    """Without a file every prompt is a user's turn in the chat template of the target."""
    config = GenerateConfig(output=tmp_path, shards=1, shard_size=8, batch_size=32, max_new_tokens=4)
    generate_shards(*target, config)
    prompts = [s.tokens[: s.prompt_length].tolist() for s in read_shards(tmp_path)]
    assert len(prompts) == 8
    assert all(prompt[0] == 1 and prompt[-2:] == [2, 3] and len(prompt) >= 7 for prompt in prompts)


def test_generate_shards_refuses_a_target_that_ends_no_turn(target, tmp_path, monkeypatch):
    monkeypatch.setattr(answers_module, "self_instruct", lambda *args: [])
    with pytest.raises(ValueError, match=r"ended no user's turn in 10 batches.*--prompts"):
        generate_shards(*target, GenerateConfig(output=tmp_path))


def test_generate_shards_skips_long_prompts(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": " ".join(["w9"] * n)}) for n in (2, 20)))
    settings = {"output": tmp_path / "data", "prompts": str(path), "shards": 1, "shard_size": 4, "max_new_tokens": 4}
    generate_shards(*target, GenerateConfig(**settings, max_prompt_tokens=8))
    assert {s.prompt_length for s in read_shards(tmp_path / "data")} == {5}
    with pytest.raises(ValueError, match=r"no prompt of at most 3 tokens.*--max-prompt-tokens"):
        generate_shards(*target, GenerateConfig(**settings, max_prompt_tokens=3))
