"""Attention for training: over keys that all rows of a text share, and over a few keys that belong to one row.

Responsible for who sees whom (:class:`Pattern`) and for the softmax over both kinds of keys. Gradients are written by
hand: torch's own attention on CPUs runs bfloat16 at a seventh of the speed of a matrix product, and a mask over all
pairs of rows is mostly minus infinity where rows see only the text and themselves. Pure; called by the objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """One key of its own for each row from ``first`` on.

    Attributes:
        first: the first row that has one.
        keys: ``[batch, rows - first, head_dim]``.
        values: as the keys.
        bias: added to the scores, ``[texts, rows - first]``: minus infinity for rows without such a key. None adds
            nothing.
    """

    first: int
    keys: Tensor
    values: Tensor
    bias: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, own: Sequence[OwnKeys] = ()) -> Tensor:
    """Attention by one softmax over shared keys and each row's own keys.

    Args:
        q: ``[batch, groups, rows, head_dim]``, scaled; the groups of a batch's entry read the same keys.
        k: ``[batch, keys, head_dim]``.
        v: as ``k``.
        bias: added to the scores, ``[texts, rows, keys]``. ``batch`` is a multiple of ``texts``: the heads of a text
            are adjacent. Every row must see at least one key. Gets no gradient.
        own: keys that a single row sees.

    Returns:
        ``[batch, groups, rows, head_dim]``.
    """
    flat = [tensor for one in own for tensor in (one.keys, one.values)]
    places = [(one.first, one.bias) for one in own]
    return _Attention.apply(q, k, v, bias, places, *flat)  # type: ignore[no-any-return]


def by_key_head(x: Tensor) -> Tensor:
    """``[texts, rows, kv_heads, head_dim]`` to ``[texts * kv_heads, rows, head_dim]``, as :func:`attend` reads keys."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def attend_by_key_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, own: Sequence[OwnKeys] = ()) -> Tensor:
    """As :func:`attend`, for queries as a decoder block has them.

    Args:
        q: ``[texts, rows, heads, head_dim]``, scaled; heads that share a key head are adjacent.
        k: ``[texts * kv_heads, keys, head_dim]``.
        v: as ``k``.
        bias: as in :func:`attend`.
        own: as in :func:`attend`.

    Returns:
        ``[texts, rows, heads * head_dim]``.
    """
    texts, rows = q.shape[:2]
    kv_heads = k.shape[0] // texts
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    out = attend(grouped, k, v, bias, own)
    by_row: Tensor = out.unflatten(0, (texts, kv_heads)).permute(0, 3, 1, 2, 4)
    return by_row.reshape(texts, rows, -1)


class _Attention(torch.autograd.Function):
    """The softmax with gradients by hand. Of the size of all scores it keeps their exponentials alone."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        places: list[tuple[int, Tensor | None]],
        *own: Tensor,
    ) -> Tensor:
        batch, groups, rows, width = q.shape
        texts = bias.shape[0]
        flat = q.reshape(batch, groups * rows, width)
        scores = torch.bmm(flat, k.transpose(1, 2)).view(batch, groups, rows, -1)
        scores.view(texts, -1, groups, rows, k.shape[1]).add_(bias[:, None, None])
        peak = scores.amax(-1)
        single: list[Tensor] = []  # [batch, groups, rows - first] each
        for (first, add), key in zip(places, own[::2], strict=True):
            score = (q[:, :, first:] * key[:, None]).sum(-1)
            if add is not None:
                score.view(texts, -1, groups, add.shape[1]).add_(add[:, None, None])
            single.append(score)
            peak[:, :, first:] = torch.maximum(peak[:, :, first:], score)
        shared = scores.sub_(peak[..., None]).exp_()
        total = shared.sum(-1)
        out = torch.bmm(shared.flatten(1, 2), v).view_as(q)
        for (first, _), score, value in zip(places, single, own[1::2], strict=True):
            score.sub_(peak[:, :, first:]).exp_()
            total[:, :, first:] += score
            out[:, :, first:] += score[..., None] * value[:, None]
        out /= total[..., None]
        ctx.firsts = [first for first, _ in places]
        ctx.save_for_backward(q, k, v, shared, total, out, *single, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shared, total, out, *rest = ctx.saved_tensors
        single, own = rest[: len(ctx.firsts)], rest[len(ctx.firsts) :]
        grad = grads[0] / total[..., None]  # [batch, groups, rows, head_dim]
        mean = (grad * out).sum(-1)
        weights, down = shared.flatten(1, 2), grad.flatten(1, 2)
        grad_v = torch.bmm(weights.transpose(1, 2), down)
        of_scores = torch.bmm(down, v.transpose(1, 2)).view_as(shared)
        of_scores.sub_(mean[..., None]).mul_(shared)
        flat = of_scores.flatten(1, 2)
        grad_q = torch.bmm(flat, k).view_as(q)
        grad_k = torch.bmm(flat.transpose(1, 2), q.flatten(1, 2))
        of_own: list[Tensor] = []
        for first, weight, key, value in zip(ctx.firsts, single, own[::2], own[1::2], strict=True):
            below = grad[:, :, first:]
            of_score = ((below * value[:, None]).sum(-1) - mean[:, :, first:]) * weight
            grad_q[:, :, first:] += of_score[..., None] * key[:, None]
            of_own += [
                (of_score[..., None] * q[:, :, first:]).sum(1),
                (weight[..., None] * below).sum(1),
            ]
        return grad_q, grad_k, grad_v, None, None, *of_own


@dataclass(frozen=True, slots=True)
class Chain:
    """One link of rows' own chains: another row that each row from ``first`` on sees.

    Attributes:
        first: the first row that may have one.
        rows: int64 ``[texts, rows - first]``, which row it is.
        bias: ``[texts, rows - first]``, minus infinity for rows that have none.
    """

    first: int
    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who sees whom among the rows of some texts.

    Attributes:
        bias: added to scores, ``[texts or 1, rows, shared]``. The first ``shared`` rows of a text are keys for all of
            its rows.
        chains: other rows that single rows see, themselves included.
    """

    bias: Tensor
    chains: tuple[Chain, ...] = ()

    @classmethod
    def causal(cls, length: int, dtype: torch.dtype, window: int | None = None) -> Pattern:
        """Each row sees those up to itself; with a window so many of them, itself included."""
        hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= ~torch.ones_like(hidden).triu(1 - window)
        return cls(torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What rows read, ``[texts, rows, heads * head_dim]``.

        Args:
            q: ``[texts, rows, heads, head_dim]``, scaled.
            k: ``[texts, rows, kv_heads, head_dim]``.
            v: as ``k``.
        """
        texts, rows, kv_heads, width = k.shape
        own = []
        both = torch.cat([k, v], dim=-1).view(texts * rows, -1) if self.chains else k
        for chain in self.chains:
            at = chain.rows + torch.arange(texts)[:, None] * rows
            # An embedding's look-up: its gradient is added row by row.
            found = by_key_head(F.embedding(at, both).unflatten(-1, (kv_heads, -1)))
            own_keys, own_values = found.split(width, dim=-1)
            own.append(OwnKeys(chain.first, own_keys, own_values, chain.bias))
        shared = self.bias.shape[2]
        keys, values = by_key_head(k[:, :shared]), by_key_head(v[:, :shared])
        return attend_by_key_head(q, keys, values, self.bias, own)
