"""Losses over a vocabulary that never hold a whole logit matrix.

Each function computes logits a few rows at a time, and finds gradients in the forward pass. Pure functions on tensors;
called by the objectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.training.head import CHUNK_ROWS, at_least_float32

# 16 MiB of float32. A weight's gradient is added to once a chunk, so these chunks are larger.
_CHUNK_LOGITS = 1 << 22
_MIN_CHUNK_ROWS = 32


class _LinearSoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of ``-sum_v P(v) log softmax(x W^T)(v)``, with both gradients found in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target_probs: Tensor) -> Tensor:
        rows = x.shape[0]
        grad_logits = torch.empty_like(target_probs)  # [rows, vocab]
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = at_least_float32(x[part] @ weight.T)
            probs = at_least_float32(target_probs[part])
            log_sum = logits.logsumexp(dim=-1, keepdim=True)
            total += (log_sum.squeeze(-1) - (probs * logits).sum(-1)).sum().double()
            grad_logits[part] = logits.sub_(log_sum).exp_().sub_(probs)
        scale = 1.0 / max(rows, 1)
        ctx.save_for_backward((grad_logits @ weight) * scale, (grad_logits.T @ x) * scale)
        return (total * scale).to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        (grad,) = grads
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_weight.dtype), None


def linear_soft_cross_entropy(x: Tensor, weight: Tensor, target_probs: Tensor) -> Tensor:
    """Cross entropy of a linear head against soft targets.

    Args:
        x: ``[rows, width]``.
        weight: ``[vocab, width]``, same type as ``x``.
        target_probs: ``[rows, vocab]``, rows sum to one; gets no gradient.

    Returns:
        The mean over rows, a float32 scalar; float64 for float64 rows.
    """
    return _LinearSoftCrossEntropy.apply(x, weight, target_probs)  # type: ignore[no-any-return]


class _HeadDistillation(torch.autograd.Function):
    """As above with the teacher's probabilities made on the way, and no gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[0]
        grad_x = torch.empty_like(x)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = (x[part] @ weight.T).float()
            probs = (teacher[part] @ weight.T).float().softmax(-1)
            log_sum = logits.logsumexp(dim=-1, keepdim=True)
            total += (log_sum.squeeze(-1) - (probs * logits).sum(-1)).sum().double()
            grad_x[part] = logits.sub_(log_sum).exp_().sub_(probs).to(x.dtype) @ weight
        scale = 1.0 / max(rows, 1)
        ctx.save_for_backward(grad_x * scale)
        return (total * scale).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        (grad,) = grads
        return grad_x * grad.to(grad_x.dtype), None, None


def head_distillation(x: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Cross entropy of a frozen head on ``x`` against the same head on ``teacher``.

    Args:
        x: ``[rows, width]``.
        teacher: ``[rows, width]``, same type; gets no gradient.
        weight: ``[vocab, width]``, same type; gets no gradient.

    Returns:
        The mean over rows of ``-sum_v softmax(teacher W^T)(v) log softmax(x W^T)(v)``, a float32 scalar.
    """
    return _HeadDistillation.apply(x, teacher, weight)  # type: ignore[no-any-return]


class _LinearHeadLoss(torch.autograd.Function):
    """``label_weight`` times cross entropy of labels, plus divergence from a teacher's softmax; either may be absent.

    A few rows of logits at a time. Gives the sum, and both parts, which get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor | None,
        label_weight: float,
        teacher_x: Tensor | None,
        teacher_weight: Tensor | None,
        row_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.shape[0]
        of_row = x.new_ones(rows, dtype=torch.float32) if row_weights is None else row_weights.float()
        step = max(_MIN_CHUNK_ROWS, _CHUNK_LOGITS // weight.shape[0])
        grad_x = torch.empty_like(x)
        # Summed in float32: of many parts in bfloat16 the small ones would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_labels, of_teacher = (x.new_zeros((), dtype=torch.float64) for _ in range(2))
        both = (label_weight if labels is not None else 0.0) + (teacher_x is not None)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            log_probs = (x[part] @ weight.T).float()
            log_probs -= log_probs.logsumexp(dim=-1, keepdim=True)
            if labels is not None:
                own = labels[part].unsqueeze(1)
                of_labels -= (log_probs.gather(1, own) * of_row[part, None]).sum().double()
            probs = None
            if teacher_x is not None:
                assert teacher_weight is not None
                wanted = (teacher_x[part] @ teacher_weight.T).float().log_softmax(-1)
                probs = wanted.exp()
                of_teacher += ((probs * wanted.sub_(log_probs)).sum(-1) * of_row[part]).sum().double()
            grad = log_probs.exp_()
            if both != 1.0:
                grad.mul_(both)
            if labels is not None:
                grad.scatter_add_(1, own, grad.new_full(own.shape, -label_weight))
            if probs is not None:
                grad.sub_(probs)
            grad = (grad if row_weights is None else grad.mul_(of_row[part, None])).to(x.dtype)
            grad_x[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ x[part]
        scale = 1.0 / (max(rows, 1) if row_weights is None else max(float(of_row.sum()), 1e-30))
        ctx.save_for_backward(
            grad_x.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale).to(weight.dtype)
        )
        of_labels, of_teacher = ((value * scale).to(torch.float32) for value in (of_labels, of_teacher))
        ctx.mark_non_differentiable(of_labels, of_teacher)
        return label_weight * of_labels + of_teacher, of_labels, of_teacher

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        grad = grads[0]
        of_weight = None if grad_weight is None else grad_weight * grad.to(grad_weight.dtype)
        return grad_x * grad.to(grad_x.dtype), of_weight, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, row_weights: Tensor | None = None
) -> Tensor:
    """Cross entropy of a linear head against labels.

    Args:
        x: ``[rows, width]``.
        weight: ``[vocab, width]``, same type as ``x``.
        labels: int64 ``[rows]``.
        row_weights: ``[rows]``, not negative; None weighs all alike. Gets no gradient.

    Returns:
        The weighted mean over rows in nats, a float32 scalar.
    """
    return _LinearHeadLoss.apply(x, weight, labels, 1.0, None, None, row_weights)[0]  # type: ignore[no-any-return]


def linear_divergence(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, row_weights: Tensor | None = None
) -> Tensor:
    """Kullback-Leibler divergence of a linear head's softmax from a teacher's, ``KL(teacher || head)``.

    Args:
        x: ``[rows, width]``.
        weight: ``[vocab, width]``, same type as ``x``.
        teacher_x: ``[rows, teacher_width]``; gets no gradient.
        teacher_weight: ``[vocab, teacher_width]``; gets no gradient.
        row_weights: as in :func:`linear_cross_entropy`.

    Returns:
        The weighted mean over rows in nats, a float32 scalar.
    """
    value, _, _ = linear_distillation(x, weight, None, 0.0, teacher_x, teacher_weight, row_weights)
    return value


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    label_weight: float,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``label_weight`` times :func:`linear_cross_entropy` plus :func:`linear_divergence`, with logits computed once.

    Args:
        x: ``[rows, width]``.
        weight: ``[vocab, width]``, same type as ``x``.
        labels: int64 ``[rows]``; None for the divergence alone.
        label_weight: of the cross entropy.
        teacher_x: ``[rows, teacher_width]``; gets no gradient.
        teacher_weight: ``[vocab, teacher_width]``; gets no gradient.
        row_weights: as in :func:`linear_cross_entropy`.

    Returns:
        The sum, the cross entropy and the divergence: float32 scalars, of which only the sum has a gradient.
    """
    return _LinearHeadLoss.apply(  # type: ignore[no-any-return]
        x, weight, labels, label_weight, teacher_x, teacher_weight, row_weights
    )
