"""Verdicts: whether two texts are the same, and why not."""

from dataclasses import replace

import pytest
import torch
from demo.support import ask, finish

import hf_ddtree
from hf_ddtree.demo import DRAFTER, Sampling
from hf_ddtree.demo.verdict import judge
from hf_ddtree.testing import VOCAB_SIZE, tiny_model


def verdict_on(loaded, drafted_change, form=None, stopped=False):
    """Return the verdict on the plain text and the text that `drafted_change` makes of its tokens."""
    form = form or ask()
    plain = finish(loaded, form).plain.token_ids
    return judge(loaded, form, form.inputs(loaded)["input_ids"], plain, drafted_change(list(plain)), stopped)


def test_judge_calls_other_policies_two_draws(loaded):
    comparison = finish(loaded, ask(drafter=DRAFTER, sampling=Sampling(policy="hybrid")))
    assert comparison.verdict.kind == "same distribution"
    assert "“hybrid”" in comparison.verdict.text


def test_judge_calls_a_real_difference_different(loaded):
    def change(tokens):
        tokens[7] = (tokens[7] + 1) % VOCAB_SIZE
        return tokens

    verdict = verdict_on(loaded, change)
    assert verdict.kind == "different"
    assert "Token 8 differs" in verdict.text and "top-1 and top-2" in verdict.text


@pytest.mark.parametrize("drafted_change", [lambda tokens: tokens[:-1], lambda tokens: [*tokens, 5]])
def test_judge_calls_a_text_of_another_length_different(loaded, drafted_change):
    verdict = verdict_on(loaded, drafted_change)
    assert verdict.kind == "different" and "the end of the text" in verdict.text


def test_judge_compares_a_stopped_text_as_far_as_it_goes(loaded):
    verdict = verdict_on(loaded, lambda tokens: tokens[:5], stopped=True)
    assert verdict.kind == "stopped" and "5 tokens" in verdict.text
    assert verdict_on(loaded, lambda tokens: [tokens[0] + 1], stopped=True).kind == "different"


def test_judge_shows_the_gap_of_a_near_tie(loaded):
    """Two tokens are tied because the head has almost the same row for both."""
    model = tiny_model("llama")
    plain = loaded.model.generate(torch.tensor([[5]]), max_new_tokens=1, do_sample=False)[0, -1].item()
    model.lm_head.weight.data[plain + 1] = model.lm_head.weight.data[plain] * (1 - 1e-8)
    tied = replace(loaded, model=hf_ddtree.enable(model))
    verdict = judge(tied, ask("\x05"), torch.tensor([[5]]), [plain], [plain + 1], stopped=False)
    assert verdict.kind == "near-tie"
    assert "top-1 and top-2 scores are 0 apart" in verdict.text


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "different"), (torch.bfloat16, "near-tie")])
def test_judge_says_whether_rounding_explains_other_draws(loaded, dtype, kind):
    changed = replace(loaded, model=hf_ddtree.enable(tiny_model("llama").to(dtype)))
    form = ask(sampling=Sampling(seed=1))
    verdict = judge(changed, form, form.inputs(loaded)["input_ids"], [5, 6, 7, 8], [5, 6, 7, 9], stopped=False)
    assert verdict.kind == kind
    assert "Token 4 differs" in verdict.text
