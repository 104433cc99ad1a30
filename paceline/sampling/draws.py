"""A drafter's own draws: what it draws from, and the draws.

Responsible for: a drafter's distribution cut to its likeliest tokens and rounded to whole numbers, and draws from
exactly that. What is sent is what was drawn from; so cutting and rounding cost some acceptance and no exactness.

Deliberately does not know: drafters, verification, the wire's form.

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
from paceline.sampling.processors import RowParams, process_logits

SUPPORT_SIZE = 32
"""Tokens that a drafter draws from; `docs/modes.md` has what other sizes come to."""


def draft_distributions(
    logits: Tensor, draft_ids: Tensor | None, rows: RowParams, support_sizes: Sequence[int]
) -> list[DraftDistribution]:
    """What a drafter draws from, for each row: its own distribution under the request's parameters, cut and rounded.

    Weight i is p_i / max p in units of 1 / 65535, so that the likeliest token's is 65535; tokens that round to zero
    leave the support.

    Args:
        logits: [rows, draft_vocab] float32
        draft_ids: [draft_vocab] int64 target id of each draft id; None where they are the same.
        rows: parameters per row.
        support_sizes: most tokens of each row's support.
    """
    processed = process_logits(logits, rows)
    top = processed.topk(min(max(support_sizes), processed.shape[-1]), dim=-1)
    shares = (top.values - top.values[:, :1]).to(torch.float64).exp()  # [rows, support], the largest 1
    weights = (shares * MAX_WEIGHT).round().to(torch.int64).cpu()
    ids = (top.indices if draft_ids is None else draft_ids[top.indices]).cpu()
    num_positive = (weights > 0).sum(dim=-1).tolist()  # weights fall along a row
    return [
        DraftDistribution.of_weights(ids[row, :size].clone(), weights[row, :size].clone())
        for row, size in enumerate(map(min, num_positive, support_sizes))
    ]


def draw_siblings(dist: DraftDistribution, rule: DrawRule, noise: Sequence[float]) -> SiblingDraws:
    """Draw one child for each uniform number.

    Without replacement the draws end with the support.

    Args:
        dist: what to draw from.
        rule: with or without replacement.
        noise: numbers in (0, 1).
    """
    left = dist.probs.clone()
    tokens = []
    for number in noise:
        if not float(left.sum()) > 0:
            break
        place = inverse_cdf(left, number)
        tokens.append(int(dist.token_ids[place]))
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left[place] = 0
    return SiblingDraws(tuple(tokens), rule, dist)


def draw_children(
    dist: DraftDistribution, rule: DrawRule, count: int, params: SamplingParams, start: int, position: int
) -> SiblingDraws:
    """`draw_siblings` with noise keyed by the request's seed, independent of all the target's draws.

    Keyed by position for rejection, which decides each position once. Keyed by the draft's beginning and the place in
    it for block verification, which looks at positions that it does not decide: those are drawn anew.

    Args:
        dist: what to draw from.
        rule: with or without replacement.
        count: draws, at least 1.
        params: the request's.
        start: committed length that the draft goes on from.
        position: absolute position of the tokens that are drawn.
    """
    if params.resolved_mode is VerifyMode.BLOCK:
        noise = [uniform_scalar(params.seed, start, NoiseRole.DRAFT, position - start)]
    else:
        noise = [uniform_scalar(params.seed, position, NoiseRole.DRAFT, draw) for draw in range(count)]
    return draw_siblings(dist, rule, noise)
