"""Attention over shared and own keys equals torch's over a mask of all pairs of rows: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.one_pass.rows import FlatRows, sample_rows
from paceline.training.attention import OwnKeys, Pattern, attend

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def _heads(texts: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(rows)
    return [
        torch.randn(texts, rows, heads, WIDTH, generator=random, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _plain(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
    bias = torch.zeros(is_seen.shape, dtype=q.dtype).masked_fill_(~is_seen, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None], enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def _scaled(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pattern.attend(q * WIDTH**-0.5, k, v)


def _assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    weights = torch.linspace(-1.0, 2.0, found.numel(), dtype=found.dtype).view_as(found)
    gradients = [torch.autograd.grad((weights * out).sum(), inputs) for out in (found, expected)]
    for own, reference in zip(*gradients, strict=True):
        assert own.abs().max() > 0
        torch.testing.assert_close(own, reference, atol=8 * tolerance, rtol=tolerance)


def test_rows_of_texts_and_their_chains() -> None:
    torch.manual_seed(3)
    rows = [sample_rows(torch.rand(length) < 0.9, 5, 0.8, 0.2) for length in (9, 23, 17)]
    flat = FlatRows.pad(rows, [torch.ones(part.shape[1], dtype=torch.bool) for part in rows])
    anchor, depth = flat.anchors, flat.depths
    is_seen = (depth[:, None] == 0) & (anchor[:, None] <= anchor[..., None])
    is_seen |= (anchor[:, None] == anchor[..., None]) & (depth[:, None] <= depth[..., None])
    for text, part in enumerate(rows):  # padding is seen by nobody, and sees the first row alone
        is_seen[text, :, part.shape[1] :] = False
    inputs = _heads(3, anchor.shape[1], torch.float64)
    found = _scaled(flat.pattern(torch.float64), *inputs)
    assert len(flat.pattern(torch.float64).chains) == 4
    _assert_same(found, _plain(*inputs, is_seen), inputs, 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 0.03)])
def test_causal_texts(dtype: torch.dtype, tolerance: float) -> None:
    inputs = _heads(2, 19, dtype)
    found = _scaled(Pattern.causal(19, dtype), *inputs)
    is_seen = torch.ones(1, 19, 19, dtype=torch.bool).tril()
    assert found.dtype == dtype
    _assert_same(found, _plain(*inputs, is_seen), inputs, tolerance)


def test_scores_that_would_overflow() -> None:
    q, k, v = (400.0 * x.detach() for x in _heads(1, 7, torch.float32))
    out = _scaled(Pattern.causal(7, torch.float32), q, k, v)
    torch.testing.assert_close(out, _plain(q, k, v, torch.ones(1, 7, 7, dtype=torch.bool).tril()))


def test_every_row_has_one_more_key() -> None:
    """As in a later step of training-time test: what the first step's row saw, and the row's own key of this one."""
    random = torch.Generator().manual_seed(5)
    q = torch.randn(4, 3, 6, WIDTH, generator=random, dtype=torch.float64).requires_grad_()
    k, v, own_k, own_v = (
        torch.randn(4, 6, WIDTH, generator=random, dtype=torch.float64).requires_grad_() for _ in range(4)
    )
    found = attend(q, k, v, Pattern.causal(6, torch.float64).bias, [OwnKeys(0, own_k, own_v)])
    seen = torch.cat([torch.ones(6, 6).tril(), torch.eye(6)], dim=1).bool()
    keys, values = (torch.cat(pair, dim=1)[:, None] for pair in ((k, own_k), (v, own_v)))
    bias = torch.zeros(6, 12, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
    expected = F.scaled_dot_product_attention(
        q, keys.expand(-1, 3, -1, -1), values.expand(-1, 3, -1, -1), attn_mask=bias, scale=1.0
    )
    _assert_same(found, expected, [q, k, v, own_k, own_v], 1e-9)
