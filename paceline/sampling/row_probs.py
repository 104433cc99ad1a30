"""Filtered logits and probabilities of rows on the sampling kernels.

Responsible for: whole rows in one call, and single probabilities of a row without writing all of them. The results are
bit for bit those of the torch operators of `processors` and `probabilities`, which define them.

Deliberately does not know: sequences, trees, verification.

Called by: `processors` and `probabilities`, for rows that `rows.can_run`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.sampling import kernels
from paceline.sampling.params import SamplingParams
from paceline.sampling.rows import describe, loaded_kernels, row_pointers


def process(logits: Tensor, params: Sequence[SamplingParams], only_scalar: bool = False) -> Tensor | None:
    """What `processors.process_logits` gives for rows with a temperature above 0: `[rows, vocab]` float32.

    None if a row has no finite largest logit.
    """
    return _fill(loaded_kernels().pl_process, torch.float32, logits, params, only_scalar, None)


def probs(
    logits: Tensor,
    params: Sequence[SamplingParams],
    only_scalar: bool = False,
    maxima: Tensor | None = None,
) -> Tensor | None:
    """What `probabilities.target_probs` gives for such rows: `[rows, vocab]` float64. None as in `process`."""
    return _fill(loaded_kernels().pl_share, torch.float64, logits, params, only_scalar, maxima)


class RowView(NamedTuple):
    """One row of logits and how a token is chosen there.

    Attributes:
        logits: `[rows, vocab]` that `rows.can_run`.
        row: index of the row.
        param: its sampling parameters, temperature above 0.
        maxima: of all rows, as `rows.maxima_of` gives them; None where unknown.
    """

    logits: Tensor
    row: int
    param: SamplingParams
    maxima: Tensor | None = None


class RowProbs:
    """Single probabilities of one row, without writing all of them: the numbers that `probs` gives."""

    def __init__(
        self, view: RowView, row: kernels.Row, measured: kernels.Measured, only_scalar: bool
    ) -> None:
        self._library = loaded_kernels()
        self._view = view  # keeps alive the memory that the kernels read
        self._row, self._measured, self._only_scalar = row, measured, only_scalar

    def __getitem__(self, token: int) -> float:
        if not 0 <= token < self._row.width:
            raise IndexError(f"token {token} is outside the vocabulary of {self._row.width}")
        prob: float = self._library.pl_share_of(self._row, self._measured, token)
        return prob

    def draw(self, noise: float, without: Sequence[int] = ()) -> int | None:
        """The token at which the running sum of probabilities passes `noise` times their total; None if no token
        is left.

        Args:
            noise: in (0, 1).
            without: distinct tokens to leave out.
        """
        if not all(0 <= token < self._row.width for token in without):
            raise IndexError(f"a token of {list(without)} is outside the vocabulary of {self._row.width}")
        left_out = (ctypes.c_int64 * len(without))(*without)
        token: int = self._library.pl_draw(
            self._row, self._measured, noise, self._only_scalar, left_out, len(without)
        )
        return None if token < 0 else token


def measure(views: Sequence[RowView], only_scalar: bool = False) -> list[RowProbs | None]:
    """Prepare rows for reads of single probabilities, all of them in one call.

    Args:
        views: the rows, of one tensor or several.
        only_scalar: as in `rows.choose`.

    Returns:
        One for each row, or None for a row without a finite largest logit, which has no probabilities.
    """
    count = len(views)
    described, measured = (kernels.Row * count)(), (kernels.Measured * count)()
    counts = (ctypes.c_int64 * count)()
    for row, view in zip(described, views, strict=True):
        describe(row, row_pointers(view.logits, view.maxima, [view.row])[0], view.logits.shape[1], view.param)
    where = ctypes.addressof(measured), ctypes.addressof(counts)
    loaded_kernels().pl_measure(described, count, torch.get_num_threads(), only_scalar, *where)
    return [
        None if found < 0 else RowProbs(view, row, own, only_scalar)
        for view, row, own, found in zip(views, described, measured, counts, strict=True)
    ]


def _fill(
    function: Callable[..., None],
    dtype: torch.dtype,
    logits: Tensor,
    params: Sequence[SamplingParams],
    only_scalar: bool,
    maxima: Tensor | None,
) -> Tensor | None:
    out = torch.empty(logits.shape, dtype=dtype)
    counts = (ctypes.c_int64 * len(params))()
    described = (kernels.Row * len(params))()
    pointers = row_pointers(logits, maxima, range(len(params)))
    for row, pointer, param in zip(described, pointers, params, strict=True):
        describe(row, pointer, logits.shape[1], param)
    function(
        described, len(params), torch.get_num_threads(), only_scalar, out.data_ptr(), ctypes.addressof(counts)
    )
    return None if any(count < 0 for count in counts) else out
