"""Which token a drafter proposes: the one that the target is likeliest to choose under the request's own rule.

Pure. Shared by methods that draft token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafts import DrawRule, SiblingDraws
from paceline.sampling.choices import race_listed, race_ranks
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.draws import draft_distributions, draw_children
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams


def choose_chain_tokens(
    logits: Tensor, draft_ids: Tensor | None, positions: Sequence[int], params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """One token for each row.

    Rows that are not coupled take the largest logit: a token that was not drawn is accepted with the target's
    probability of it, which the likeliest token maximises. Coupled rows run the target's own Gumbel race on the
    drafter's distribution, with the noise of the *target's* ids, so that equal distributions give equal tokens.

    Args:
        logits: `[rows, draft_vocab]` float32.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        positions: absolute position of the token that each row proposes.
        params: how the target will choose, for each row.

    Returns:
        Target ids `[rows]` int64, and their natural log-probabilities `[rows]` under the drafter.
    """
    coupled = [i for i, p in enumerate(params) if p.resolved_mode is VerifyMode.COUPLED]
    best, chosen = logits.max(dim=-1)
    log_probs = best - logits.logsumexp(dim=-1)
    if coupled:
        rows = torch.tensor(coupled, device=logits.device)
        part = RowParams.build([params[i] for i in coupled], [1] * len(coupled), logits.device)
        processed = process_logits(logits[rows], part)
        winners = race_listed(processed, [positions[i] for i in coupled], part, draft_ids)
        chosen[rows] = winners
        normalised = processed.log_softmax(dim=-1)
        log_probs[rows] = normalised.gather(1, winners.unsqueeze(1)).squeeze(1)
    return (chosen if draft_ids is None else draft_ids[chosen]), log_probs


def rank_children(
    logits: Tensor,
    draft_ids: Tensor | None,
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    count: int,
) -> tuple[list[list[float]], list[list[int]]]:
    """The tokens that the target is likeliest to choose under each request's rule, best first; as in `rank_by_race`."""
    coupled = [i for i, p in enumerate(params) if p.resolved_mode is VerifyMode.COUPLED]
    if len(coupled) == len(params):
        return rank_by_race(logits, draft_ids, positions, params, count)
    log_probs, ids = (
        top.tolist() for top in logits.log_softmax(-1).topk(min(count, logits.shape[1]), dim=-1)
    )
    if coupled:
        part = [positions[i] for i in coupled], [params[i] for i in coupled]
        for i, *own in zip(coupled, *rank_by_race(logits[coupled], draft_ids, *part, count), strict=True):
            log_probs[i], ids[i] = own
    return log_probs, ids


def rank_by_race(
    logits: Tensor,
    draft_ids: Tensor | None,
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    count: int,
) -> tuple[list[list[float]], list[list[int]]]:
    """The tokens that the target is likeliest to choose in coupled mode, best first, for each row.

    The target's noise is known; only the difference between its logits and the drafter's is not. If that difference is
    a Gumbel number for each token, the chance to win is a softmax over the sums of logit and noise.

    Args:
        logits: `[rows, draft_vocab]` float32.
        draft_ids: as in `choose_chain_tokens`.
        positions: absolute position of the token that each row proposes.
        params: how the target will choose, for each row; all in coupled mode.
        count: tokens wanted of each row; fewer if filters left fewer.

    Returns:
        Natural logarithms of the chances, and draft ids.
    """
    places, sums = race_ranks(logits, positions, params, draft_ids, count)
    return sums.log_softmax(dim=-1).tolist(), places.tolist()


def draw_chain_tokens(
    logits: Tensor,
    draft_ids: Tensor | None,
    starts: Sequence[int],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    rules: Sequence[DrawRule],
    counts: Sequence[int],
    support_sizes: Sequence[int],
) -> list[SiblingDraws]:
    """The children of one node for each row, drawn from the drafter's own distribution under the request's parameters.

    Args:
        logits: `[rows, draft_vocab]` float32.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        starts: committed length that each row's draft continues.
        positions: absolute position of the tokens that each row proposes.
        params: the request's, for each row.
        rules: with or without replacement.
        counts: children of each row, at least 1; block verification always takes one.
        support_sizes: most tokens that each row draws from.
    """
    rows = RowParams.build(params, [1] * len(params), logits.device)
    dists = draft_distributions(logits, draft_ids, rows, support_sizes)
    return [
        draw_children(dist, rule, count, param, start, position)
        for dist, rule, count, param, start, position in zip(
            dists, rules, counts, params, starts, positions, strict=True
        )
    ]


def log_prob_of(draws: SiblingDraws, token: int) -> float:
    """Natural log of a drawn token's probability."""
    assert isinstance(draws.distribution, DraftDistribution)
    return math.log(draws.distribution.prob(token))
