"""The training loss."""

import pytest
import torch

from hf_ddtree.training import loss as loss_module
from hf_ddtree.training.blocks import IGNORED
from hf_ddtree.training.loss import candidate_tokens, draft_loss


@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_draft_loss_equals_the_formula_and_its_gradient(monkeypatch, kl_weight):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 20)  # two rows at a time
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(3, 2, 8, generator=generator), torch.randn(10, 8, generator=generator)
    teacher = torch.randn(3, 2, 8, generator=generator)
    labels = torch.tensor([[1, 2], [3, IGNORED], [4, 5]])
    candidates = candidate_tokens(labels, torch.empty(0), 0, 10)
    states.requires_grad_()
    loss, counts = draft_loss(states, labels, head, candidates, 2.0, teacher, kl_weight)
    (gradient,) = torch.autograd.grad(3 * loss, states)

    log_q, log_p = (states @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    kept = labels != IGNORED
    weights = torch.exp(-torch.arange(2) / 2.0).expand(3, 2)[kept]
    cross_entropy = -log_q[kept].gather(1, labels[kept][:, None])[:, 0]
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[kept]
    expected = (weights * ((1 - kl_weight) * cross_entropy + kl_weight * divergence)).sum() / weights.sum()
    (expected_gradient,) = torch.autograd.grad(3 * expected, states)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert counts[:, 1].tolist() == [3, 2]
    assert counts[:, 0].sum() == (log_q.argmax(-1) == labels).sum()


def test_candidate_tokens_include_every_label():
    labels = torch.tensor([[5, IGNORED], [90, 7]])
    candidates = candidate_tokens(labels, torch.tensor([1, 2]), 10, 100)
    assert {1, 2, 5, 7, 90} <= set(candidates.tolist())
    assert candidates.tolist() == sorted(set(candidates.tolist()))


def test_candidate_tokens_are_the_vocabulary_without_a_sample():
    labels = torch.tensor([[5, IGNORED]])
    assert candidate_tokens(labels, torch.empty(0), 0, 10).tolist() == list(range(10))
