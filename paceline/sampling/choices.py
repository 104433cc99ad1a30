"""The token that the target chooses at a row, in the modes where the choice does not depend on drafts.

Responsible for: greedy choice, and Gumbel-max choice with noise keyed by seed and position.

Deliberately does not know: drafts, trees, sequences. That is why these modes give one text whatever was
drafted.

Called by: `batch` for the target's rows; drafters, on their own logits, to draft the token that the target most
likely chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.sampling import rows as kernel_rows
from paceline.sampling.noise import NoiseRole, gumbel, gumbel_at
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.sampling.processors import process_logits
from paceline.sampling.row_params import RowParams

_MODES_WITH_CHOICES = frozenset({VerifyMode.GREEDY, VerifyMode.COUPLED})
_SPARSE_FRACTION = 16  # with fewer than vocab / 16 tokens left, noise for those alone is cheaper than for all


def target_choices(
    logits: Tensor,
    positions: Sequence[int],
    rows: RowParams,
    at: Sequence[int] | None = None,
    maxima: Tensor | None = None,
) -> Tensor:
    """One token per row: the largest logit, or the winner of a Gumbel race.

    Coupled mode is Gumbel-max sampling with shared noise (Daliri, Musco and Suresh, arXiv 2408.07978, section
    4). The choice has exactly the processed distribution, and depends only on logits, parameters and position.

    Args:
        logits: [rows, vocab] float32
        positions: absolute position of the token that each row chooses: the row's own position plus one.
        rows: parameters per row; modes greedy and coupled only.
        at: which rows of the logits choose, in the order of positions and parameters; None means all.
        maxima: of all rows of the logits, as `rows.maxima_of` gives them; None where unknown.

    Returns:
        [rows] int64, one for each row that chooses.
    """
    at = range(logits.shape[0]) if at is None else at
    if not len(rows) == len(positions) == len(at):
        raise ValueError(
            f"{len(at)} rows of logits but parameters for {len(rows)}, {len(positions)} positions"
        )
    for mode in rows.modes:
        if mode not in _MODES_WITH_CHOICES:
            raise ValueError(f"rows in {mode} mode have no choice of their own; pass them to `verify_step`")
    choices = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy = [index for index, param in enumerate(rows.params) if param.is_greedy]
    left = [index for index, param in enumerate(rows.params) if not param.is_greedy]
    if greedy:
        wanted = [at[index] for index in greedy]
        choices[greedy] = largest(logits[wanted], None if maxima is None else maxima[wanted])
    if left and kernel_rows.can_run(logits):
        params, wanted = [rows.params[index] for index in left], [at[index] for index in left]
        where = [positions[index] for index in left]
        winners = kernel_rows.choose(logits, wanted, where, params, maxima=maxima)
        found = [(index, winner) for index, winner in zip(left, winners, strict=True) if winner is not None]
        if len(found) == len(rows):
            return torch.tensor([winner for _, winner in found])
        for index, winner in found:
            choices[index] = winner
        left = [index for index, winner in zip(left, winners, strict=True) if winner is None]
    # Each row's own parameters choose its group, so that its computation does not depend on its neighbours.
    for name, race in (("filtered", _race_filtered), ("whole", _race_whole)):
        members = [index for index in left if _is_filtered(rows.params[index]) == (name == "filtered")]
        if members:
            part = rows.select(members)
            position = torch.tensor([positions[index] for index in members], device=logits.device)
            processed = process_logits(logits[[at[index] for index in members]], part)
            choices[members] = race(processed, position, part.seeds)
    return choices


def coupled_choices(
    logits: Tensor,
    at: Sequence[int],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    maxima: Tensor | None = None,
) -> list[int]:
    """`target_choices` for rows in coupled mode alone, without tensors: a walk needs few rows, many times a step.

    Args:
        logits: [rows, vocab] float32
        at: which rows choose.
        positions: absolute position of the token that each of them chooses.
        params: sampling parameters of each.
        maxima: as in `target_choices`.
    """
    if kernel_rows.can_run(logits):
        found = [
            winner
            for winner in kernel_rows.choose(logits, at, positions, params, maxima=maxima)
            if winner is not None
        ]
        if len(found) == len(at):
            return found
    rows = RowParams.build(params, [1] * len(params), logits.device)
    chosen: list[int] = target_choices(logits, positions, rows, at, maxima).tolist()
    return chosen


def race_listed(
    processed: Tensor, positions: Sequence[int], rows: RowParams, token_ids: Tensor | None
) -> Tensor:
    """The columns that win the target's race in rows over some token ids only.

    Args:
        processed: [rows, n] float32 as `process_logits` gives them: filters applied, the largest 0.
        positions: absolute position of the token that each row chooses.
        rows: parameters per row, for their seeds.
        token_ids: [n] int64 target id of each column; None where columns are target ids.

    Returns:
        [rows] int64 columns.
    """
    if kernel_rows.can_run(processed):
        seeds = [param.seed for param in rows.params]
        columns = kernel_rows.race(processed, positions, seeds, token_ids)
        found = [column for column in columns if column is not None]
        if len(found) == len(columns):
            return torch.tensor(found)
    ids = torch.arange(processed.shape[1], device=processed.device) if token_ids is None else token_ids
    where = torch.tensor(positions, device=processed.device)
    noise = gumbel_at(rows.seeds, where, NoiseRole.TARGET, ids.expand(processed.shape[0], -1))
    return noise.add_(processed).argmax(dim=-1)


def race_ranks(
    logits: Tensor,
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    token_ids: Tensor | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The best columns of the target's race in rows over some token ids only, filters applied.

    Args:
        logits: [rows, n] float32
        positions: absolute position of the token that each row chooses.
        params: sampling parameters of each, temperature above 0.
        token_ids: [n] int64 target id of each column; None where columns are target ids.
        count: columns wanted, at least 1.

    Returns:
        Columns [rows, m] int64, best first, and their sums of scaled logit and noise, [rows, m] float32; m is
            `count`, or less where filters leave fewer in some row.
    """
    if kernel_rows.can_run(logits):
        ranked = kernel_rows.rank(logits, positions, params, token_ids, count)
        if ranked is not None:
            return ranked
    rows = RowParams.build(params, [1] * len(params), logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    where = torch.tensor(positions, device=logits.device)
    sums = gumbel_at(rows.seeds, where, NoiseRole.TARGET, ids.expand(logits.shape[0], -1))
    best, columns = sums.add_(process_logits(logits, rows)).topk(min(count, logits.shape[1]), dim=-1)
    left = int((~best.isneginf()).sum(dim=-1).min())
    return columns[:, :left], best[:, :left]


def greedy_choices(logits: Tensor, maxima: Tensor | None = None) -> list[int]:
    """`largest` as a list, in as few calls as possible: after a pass the processor's caches are cold, and each
    call costs.

    Args:
        logits: [rows, vocab] float32
        maxima: as in `largest`.
    """
    if maxima is not None and kernel_rows.can_run(logits):
        return kernel_rows.largest(logits, maxima)
    chosen: list[int] = largest(logits, maxima).tolist()
    return chosen


def largest(rows: Tensor, maxima: Tensor | None = None) -> Tensor:
    """Index of each row's largest entry, the first of equals: `[rows, n] -> [rows]` int64.

    If the maxima of a CPU's rows are known (see `rows.maxima_of`), only they and one set of each row are read.
    On a CPU numpy does it, sixteen entries at a time: 6 rows of 49,152 take 22 us, in torch 244 us.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.argmax(dim=-1)
    if maxima is None:
        return torch.from_numpy(np.argmax(rows.numpy(), axis=-1))
    firsts = np.argmax(maxima.numpy(), axis=-1) * kernel_rows.SET
    entries = rows.numpy()
    found = [
        first + np.argmax(row[first : first + kernel_rows.SET])
        for first, row in zip(firsts, entries, strict=True)
    ]
    return torch.tensor(found, dtype=torch.int64)


def _race_whole(processed: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """[rows] int64: argmax of processed logit plus Gumbel noise over the whole vocabulary."""
    noise = gumbel(seeds, positions, NoiseRole.TARGET, processed.shape[1])
    return largest(noise.add_(processed))


def _race_filtered(processed: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """The same race where few tokens are left. Ids are in rising order, so that ties end as in `_race_whole`."""
    largest_count = max(1, int(processed.isfinite().sum(dim=-1).max()))
    if largest_count > processed.shape[1] // _SPARSE_FRACTION:
        return _race_whole(processed, positions, seeds)
    token_ids = processed.topk(largest_count, dim=-1).indices.sort(dim=-1).values  # [rows, largest_count]
    noise = gumbel_at(seeds, positions, NoiseRole.TARGET, token_ids)
    winners = noise.add_(processed.gather(1, token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, winners).squeeze(1)


def _is_filtered(param: SamplingParams) -> bool:
    return param.top_k > 0 or param.top_p < 1 or param.min_p > 0
