"""Losses computed a few rows at a time equal torch's own, values and gradients, and keep no logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.training import head, losses

ROWS, WIDTH, VOCAB = 11, 6, 17


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows at once, so that the last part is smaller."""
    monkeypatch.setattr(losses, "_CHUNK_LOGITS", 4 * VOCAB)
    monkeypatch.setattr(losses, "_MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 4)
    monkeypatch.setattr(head, "CHUNK_ROWS", 4)


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=random).requires_grad_()
    return x, torch.randn(VOCAB, WIDTH, generator=random).requires_grad_()


def _assert_same(found: Tensor, expected: Tensor, operands: tuple[Tensor, Tensor]) -> None:
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for own, reference in zip(
        torch.autograd.grad(3.0 * found, operands), torch.autograd.grad(3.0 * expected, operands), strict=True
    ):
        torch.testing.assert_close(own, reference, atol=1e-5, rtol=1e-4)


def test_cross_entropy(operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    labels = torch.arange(ROWS) % VOCAB
    expected = F.cross_entropy(x @ weight.T, labels)
    _assert_same(losses.linear_cross_entropy(x, weight, labels), expected, operands)
    each = head.label_losses(x.detach(), weight.detach(), labels)
    assert float(each.mean()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert each.shape == (ROWS,)


def test_divergence(operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    random = torch.Generator().manual_seed(4)
    teacher_x, teacher = (
        torch.randn(ROWS, 3, generator=random),
        torch.randn(VOCAB, 3, generator=random),
    )
    wanted = (teacher_x @ teacher.T).log_softmax(-1)
    expected = F.kl_div((x @ weight.T).log_softmax(-1), wanted, reduction="batchmean", log_target=True)
    _assert_same(losses.linear_divergence(x, weight, teacher_x, teacher), expected, operands)
    same = losses.linear_divergence(x.detach(), weight.detach(), x.detach(), weight.detach())
    assert float(same) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_both_at_once(is_weighted: bool, operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    random = torch.Generator().manual_seed(4)
    teacher_x, teacher = (torch.randn(n, 3, generator=random) for n in (ROWS, VOCAB))
    labels = torch.arange(ROWS) % VOCAB
    rows = torch.rand(ROWS, generator=random) if is_weighted else None
    ce = losses.linear_cross_entropy(x, weight, labels, rows)
    kd = losses.linear_divergence(x, weight, teacher_x, teacher, rows)
    value, shown_ce, shown_kd = losses.linear_distillation(x, weight, labels, 0.3, teacher_x, teacher, rows)
    _assert_same(value, 0.3 * ce + kd, operands)
    assert not shown_ce.requires_grad
    assert [float(shown_ce), float(shown_kd)] == pytest.approx([float(ce.detach()), float(kd.detach())])


def test_no_logits_are_kept_for_the_backward_pass(operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    loss = losses.linear_cross_entropy(x, weight, torch.zeros(ROWS, dtype=torch.int64))
    kept = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [tuple(tensor.shape) for tensor in kept] == [(ROWS, WIDTH), (VOCAB, WIDTH)]


def test_a_frozen_head_gets_no_gradient(operands: tuple[Tensor, Tensor]) -> None:
    x, weight = operands
    loss = losses.linear_cross_entropy(x, weight.detach(), torch.zeros(ROWS, dtype=torch.int64))
    kept = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert kept[1] is None
    loss.backward()
    assert x.grad is not None
