"""A drafter's own draws, and the distribution that it draws from.

Responsible for: cutting a drafter's distribution to its likeliest tokens, rounding it to whole numbers, and
drawing from exactly that. The drafter sends what it drew from, so cutting and rounding cost some acceptance and
no exactness.

Deliberately does not know: drafters, verification, the form on the wire.

Called by: drafters, for requests in modes that verify draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafts import DrawRule, SiblingDraws
from paceline.sampling.distribution import MAX_WEIGHT, DraftDistribution, inverse_cdf
from paceline.sampling.noise import NoiseRole, uniform_scalar
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams

SUPPORT_SIZE = 32
"""Tokens that a drafter draws from; `docs/modes.md` has measurements of other sizes."""


def draft_distributions(
    logits: Tensor, draft_ids: Tensor | None, rows: RowParams, support_sizes: Sequence[int]
) -> list[DraftDistribution]:
    """What a drafter draws from, for each row: its distribution under the request's parameters, cut and rounded.

    Weight i is p_i / max p in units of 1 / 65535, so that the likeliest token has 65535. Tokens that round to
    zero leave the support.

    Args:
        logits: [rows, draft_vocab] float32
        draft_ids: [draft_vocab] int64 target id of each draft id; None where they are the same.
        rows: parameters per row.
        support_sizes: most tokens of each row's support.
    """
    processed = process_logits(logits, rows)
    top = processed.topk(min(max(support_sizes), processed.shape[-1]), dim=-1)
    ratios = (top.values - top.values[:, :1]).to(torch.float64).exp()  # [rows, support], the largest 1
    weights = (ratios * MAX_WEIGHT).round().to(torch.int64).cpu()
    ids = (top.indices if draft_ids is None else draft_ids[top.indices]).cpu()
    num_positive = (weights > 0).sum(dim=-1).tolist()  # weights fall along a row
    return [
        DraftDistribution.of_weights(ids[row, :size].clone(), weights[row, :size].clone())
        for row, size in enumerate(map(min, num_positive, support_sizes))
    ]


def draw_siblings(dist: DraftDistribution, rule: DrawRule, noise: Sequence[float]) -> SiblingDraws:
    """Draw one child for each uniform number. Without replacement the draws end when the support is exhausted.

    Args:
        dist: the distribution to draw from.
        rule: with or without replacement.
        noise: numbers in (0, 1).
    """
    left = dist.probs.clone()
    tokens = []
    for number in noise:
        if not float(left.sum()) > 0:
            break
        index = inverse_cdf(left, number)
        tokens.append(int(dist.token_ids[index]))
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left[index] = 0
    return SiblingDraws(tuple(tokens), rule, dist)


def draw_children(
    dist: DraftDistribution, rule: DrawRule, count: int, params: SamplingParams, start: int, position: int
) -> SiblingDraws:
    """`draw_siblings` with noise keyed by the request's seed, independent of all of the target's draws.

    For rejection the key is the position: each position is decided once. For block verification the key is the
    draft's first position and the offset in the draft: positions that a block reads without deciding them are
    drawn again.

    Args:
        dist: the distribution to draw from.
        rule: with or without replacement.
        count: draws, at least 1.
        params: of the request.
        start: committed length that the draft continues.
        position: absolute position of the tokens that are drawn.
    """
    if params.resolved_mode is VerifyMode.BLOCK:
        noise = [uniform_scalar(params.seed, start, NoiseRole.DRAFT, position - start)]
    else:
        noise = [uniform_scalar(params.seed, position, NoiseRole.DRAFT, draw) for draw in range(count)]
    return draw_siblings(dist, rule, noise)
