"""Tokens per round inside generate."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ddtree
from hf_ddtree.training.evaluate import evaluate


@pytest.fixture(scope="module")
def target(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w90 w95", "kind": "new"}\n{"prompt": "w91 w96 w97", "kind": "other"}')
    return str(path)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_evaluate_pools_the_rounds_of_all_kinds(target, trained, prompts, temperature):
    drafter = hf_ddtree.load_drafter(trained, dtype=target[0].dtype)
    table = evaluate(*target, drafter, prompts, [0, 8], temperature, max_new_tokens=24)
    assert list(table) == ["all", "new", "other"]
    for budget in ("chain", "8"):
        low, high = sorted(table[kind][budget] for kind in ("new", "other"))
        assert 1 <= low <= table["all"][budget] <= high
    assert table["all"]["8"] >= table["all"]["chain"]


def test_evaluate_refuses_a_negative_budget(target, trained, prompts):
    with pytest.raises(ValueError, match="--budgets 4 -1 has a negative budget"):
        evaluate(*target, hf_ddtree.load_drafter(trained), prompts, [4, -1])


def test_evaluate_refuses_the_chain_of_a_causal_lm(target, target_folder, prompts):
    drafter = hf_ddtree.load_drafter(str(target_folder))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no block.*budget 1"):
        evaluate(*target, drafter, prompts, [0])
