"""A sum of losses whose graphs are never held together: gradients of each part are taken before the next is built.

Pure; called by objectives that cut a batch into parts to save memory. To the trainer the result is one loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class _WithGradients(torch.autograd.Function):
    """A number with gradients that were found before."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (None, None, *(None if g is None else g * grad.to(g.dtype) for g in ctx.gradients))


def accumulate(parts: Iterable[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """The sum of some scalar losses, with the sum of their gradients.

    Args:
        parts: each is built when it is asked for, and its graph freed before the next.
        parameters: what the gradients are taken for.
    """
    total = torch.zeros(())
    gradients: list[Tensor | None] = [None] * len(parameters)
    for part in parts:
        total = total + part.detach()
        if part.requires_grad:
            fresh = torch.autograd.grad(part, list(parameters), allow_unused=True)
            gradients = [
                new if old is None else old if new is None else old + new
                for old, new in zip(gradients, fresh, strict=True)
            ]
    return _WithGradients.apply(total, gradients, *parameters)  # type: ignore[no-any-return]
