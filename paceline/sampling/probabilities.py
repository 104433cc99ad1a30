"""The distribution that a row's token is sampled from.

Responsible for: probabilities of whole rows, and of single tokens for walks that read few of them.

Deliberately does not know: noise, drafts, which row belongs to which sequence.

Called by: `batch`, and the modes that verify draws. On a CPU `row_probs` computes the same bits with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import row_probs
from paceline.sampling import rows as kernel_rows
from paceline.sampling.distribution import inverse_cdf
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import masses_of, process_with_torch
from paceline.sampling.row_params import RowParams


def target_probs(logits: Tensor, rows: RowParams) -> Tensor:
    """[rows, vocab] float64: the distribution that each row is sampled from; one-hot for greedy rows.

    Probabilities are multiples of 2**-40 of the likeliest token's, with a relative error below 3e-6, which is
    what rounding of float32 logits causes anyway. In return they have the same bits on every device.
    """
    sampled = [index for index, param in enumerate(rows.params) if not param.is_greedy]
    if len(sampled) == len(rows):
        return _probs_sampled(logits, rows.params)
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    probs.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if sampled:
        probs[sampled] = _probs_sampled(logits[sampled], rows.select(sampled).params)
    return probs


class ProbRows:
    """`target_probs` for walks that read some rows only: `[rows, vocab]` float64, indexed by row or (row, token).

    Where the kernels run, a row is computed when the whole of it is first read, and single probabilities are
    computed without the rest. Elsewhere all rows are computed at once: one operation for all costs less than
    one for each.
    """

    def __init__(self, logits: Tensor, rows: RowParams, maxima: Tensor | None = None) -> None:
        self.shape = logits.shape
        self._logits = logits
        self._maxima = maxima
        self._rows = rows
        self._known: dict[int, Tensor] = {}
        self._measured: dict[int, row_probs.RowProbs | None] = {}  # None: not computed by the kernels
        self._runs_on_kernels = kernel_rows.can_run(logits)

    def __getitem__(self, key: int | tuple[int, int]) -> Tensor:
        row, *tokens = key if isinstance(key, tuple) else (key,)
        if tokens and (single := self._row_probs(row)) is not None:
            return torch.tensor(single[tokens[0]], dtype=torch.float64)
        if row not in self._known:
            param = self._rows.params[row]
            if self._runs_on_kernels and not param.is_greedy:
                own = None if self._maxima is None else self._maxima[row : row + 1]
                self._known[row] = _probs_sampled(self._logits[row : row + 1], (param,), own)[0]
            else:
                self._known = dict(enumerate(target_probs(self._logits, self._rows)))
        found = self._known[row]
        return found[tokens[0]] if tokens else found

    def draw(self, row: int, noise: float, without: Sequence[int] = ()) -> int:
        """A token drawn from a row by a number in (0, 1), leaving out some distinct tokens."""
        if (single := self._row_probs(row)) is not None:
            token = single.draw(noise, without)
            if token is not None:
                return token
        return draw_without(self[row], noise, without)

    def _row_probs(self, row: int) -> row_probs.RowProbs | None:
        """A row's single probabilities; None where the kernels do not compute them, or the whole row is known."""
        if row in self._known:
            return None
        measure_rows([(self, row)])
        return self._measured[row]

    def unmeasured(self, row: int) -> row_probs.RowView | None:
        """A row that the kernels must measure before its single probabilities can be read; None for any other row."""
        if row in self._measured or row in self._known:
            return None
        param = self._rows.params[row]
        if not self._runs_on_kernels or param.is_greedy:
            self._measured[row] = None
            return None
        return row_probs.RowView(self._logits, row, param, self._maxima)

    def take(self, row: int, measured: row_probs.RowProbs | None) -> None:
        """Keep the kernels' measurement of a row."""
        self._measured[row] = measured


def measure_rows(rows: Sequence[tuple[ProbRows, int]]) -> None:
    """Prepare rows for reads of single probabilities; the kernels measure all of them in one call."""
    views = [(probs, row, view) for probs, row in rows if (view := probs.unmeasured(row)) is not None]
    if views:
        found = row_probs.measure([view for _, _, view in views])
        for (probs, row, _), measured in zip(views, found, strict=True):
            probs.take(row, measured)


def draw_without(probs: Tensor, noise: float, without: Sequence[int] = ()) -> int:
    """A token drawn from probabilities `[vocab]` float64 by a number in (0, 1), leaving out some distinct tokens.

    Where leaving them out would leave nothing, which only rounding can cause, nothing is left out.
    """
    if without:
        rest = probs.clone()
        rest[list(without)] = 0
        probs = rest if float(rest.sum()) > 0 else probs
    return inverse_cdf(probs, noise)


def _probs_sampled(logits: Tensor, params: Sequence[SamplingParams], maxima: Tensor | None = None) -> Tensor:
    """[rows, vocab] float64; all rows have a temperature above 0."""
    if kernel_rows.can_run(logits):
        probs = row_probs.probs(logits, params, maxima=maxima)
        if probs is not None:
            return probs
    return probs_with_torch(logits, params)


def probs_with_torch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The definition of the probabilities, for any device: masses over the sum of the masses that the filters
    keep.
    """
    processed = process_with_torch(logits, params)
    masses = masses_of(processed)
    probs = masses.to(torch.float64).mul_(1.0 / masses.sum(dim=-1, keepdim=True).to(torch.float64))
    return probs.masked_fill_(processed.isnan(), torch.nan)
