"""Rows of logits on the sampling kernels: choices and filtered logits, all rows in one call and without copies.

Responsible for: describing rows to the kernels, and saying when they can be used: float32 on a CPU, library compiled.
What comes back is bit for bit what the torch operators of `choices`, `noise` and `processors` give; they are the
definition and take every row that the kernels do not.

Deliberately does not know: sequences, trees, verification.

Called by: `choices` and `processors`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.sampling import kernels
from paceline.sampling.noise import NoiseRole
from paceline.sampling.params import SamplingParams

_MASK_64 = 2**64 - 1
_LOWEST = -torch.finfo(torch.float32).max  # below it is only -inf, which no race is won with
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
SET = 32  # logits, one after the other, whose largest their maker may have kept; as in `passes.h`
_MAX_WIDTH = 2**22  # above, the masses of a nucleus could overflow 63 bits


def can_run(logits: Tensor) -> bool:
    """Whether the kernels take these rows: `[rows, vocab]` float32 in CPU memory."""
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.dim() == 2
        and logits.stride(1) == 1
        and 0 < logits.shape[1] <= _MAX_WIDTH
        and not logits.requires_grad
        and kernels.load() is not None
    )


def maxima_of(logits: Tensor) -> Tensor:
    """The largest of every 32 logits: `[rows, vocab] -> [rows, ceil(vocab / 32)]` float32, NaN where one is."""
    padded = F.pad(logits, (0, -logits.shape[1] % SET), value=-math.inf)
    return padded.view(logits.shape[0], -1, SET).amax(dim=-1)


def largest(logits: Tensor, maxima: Tensor, only_scalar: bool = False) -> list[int]:
    """Where each row is largest, the first of equals and a NaN above all, by its maxima.

    Args:
        logits: `[rows, vocab]` that `can_run`.
        maxima: of all rows, as `maxima_of` gives them.
        only_scalar: as in `choose`.
    """
    library = kernels.load()
    assert library is not None, "checked by can_run"
    num_rows, width = logits.shape
    _check_maxima(logits, maxima)
    found = (ctypes.c_int64 * num_rows)()
    library.pl_largest(
        *(logits.data_ptr(), logits.stride(0), maxima.data_ptr(), maxima.stride(0), num_rows, width),
        *(torch.get_num_threads(), only_scalar, ctypes.addressof(found)),
    )
    return list(found)


def choose(
    logits: Tensor,
    at: Sequence[int],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    only_scalar: bool = False,
    maxima: Tensor | None = None,
) -> list[int | None]:
    """The winners of the coupled races of some rows, filters applied.

    Args:
        logits: `[rows, vocab]` that `can_run`.
        at: the rows that are to choose.
        positions: absolute position of the token that each of them chooses.
        params: sampling parameters of each, temperature above 0.
        only_scalar: for tests: the plain C form, whatever the processor has.
        maxima: of all rows, as `maxima_of` gives them; None where they are not known.

    Returns:
        A token id for each, or None for a row without a finite largest logit.
    """
    described = (kernels.Row * len(at))()
    for row, place, position, param in zip(
        described, _places(logits, maxima, at), positions, params, strict=True
    ):
        _describe(row, place, logits.shape[1], param)
        row.key = _key(param.seed, position, NoiseRole.TARGET)
    return _choose(described, only_scalar)


def race(
    processed: Tensor,
    positions: Sequence[int],
    seeds: Sequence[int],
    token_ids: Tensor | None,
    only_scalar: bool = False,
) -> list[int | None]:
    """The winners' places in rows as `process` gives them; `token_ids`: `[vocab]` int64, whose noise a place has."""
    ids = _checked_ids(token_ids, processed.shape[1])
    pointer = 0 if ids is None else ids.data_ptr()
    described = (kernels.Row * len(positions))()
    pointers = _pointers(processed, range(len(positions)))
    for row, place, position, seed in zip(described, pointers, positions, seeds, strict=True):
        key = _key(seed, position, NoiseRole.TARGET)
        row.logits, row.ids, row.width, row.key = place, pointer, processed.shape[1], key
        row.top_k, row.top_p, row.temperature, row.floor = 0, 1.0, 1.0, _LOWEST
    return _choose(described, only_scalar)


def rank(
    logits: Tensor,
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    token_ids: Tensor | None,
    count: int,
    only_scalar: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """The first of each row's coupled race, filters applied, and what they ran with: one call for all of them.

    Args:
        logits: `[rows, n]` that `can_run`.
        positions: absolute position of the token that each row chooses.
        params: sampling parameters of each, temperature above 0.
        token_ids: `[n]` int64 target id of each place; None where they are the places.
        count: places wanted of each row, at least 1; fewer where filters leave some row fewer.
        only_scalar: as in `choose`.

    Returns:
        Places `[rows, count]` int64, best first, and sums of scaled logit and noise, float32; None where a row has no
        finite largest logit.
    """
    library = kernels.load()
    assert library is not None, "checked by can_run"
    num_rows, width = logits.shape
    ids = _checked_ids(token_ids, width)
    described = (kernels.Row * num_rows)()
    for row, place, position, param in zip(
        described, _places(logits, None, range(num_rows)), positions, params, strict=True
    ):
        _describe(row, place, width, param)
        row.ids = 0 if ids is None else ids.data_ptr()
        row.key = _key(param.seed, position, NoiseRole.TARGET)
    places = torch.empty(num_rows, count, dtype=torch.int64)
    sums, counts = torch.empty(num_rows, count), (ctypes.c_int64 * num_rows)()
    library.pl_rank(
        *(described, num_rows, count, torch.get_num_threads(), only_scalar),
        *(places.data_ptr(), sums.data_ptr(), ctypes.addressof(counts)),
    )
    fewest = min(counts, default=0)
    return None if fewest < 0 else (places[:, :fewest], sums[:, :fewest])


def process(logits: Tensor, params: Sequence[SamplingParams], only_scalar: bool = False) -> Tensor | None:
    """What `processors.process_logits` gives for rows with a temperature above 0: `[rows, vocab]` float32.

    None where a row has no finite largest logit.
    """
    library = kernels.load()
    assert library is not None, "checked by can_run"
    return _fill(library.pl_process, torch.float32, logits, params, only_scalar, None)


def probs(
    logits: Tensor,
    params: Sequence[SamplingParams],
    only_scalar: bool = False,
    maxima: Tensor | None = None,
) -> Tensor | None:
    """What `processors.target_probs` gives for such rows: `[rows, vocab]` float64. None as in `process`."""
    library = kernels.load()
    assert library is not None, "checked by can_run"
    return _fill(library.pl_share, torch.float64, logits, params, only_scalar, maxima)


class RowView(NamedTuple):
    """One row of logits and how a token is chosen there.

    Attributes:
        logits: `[rows, vocab]` that `can_run`.
        row: which of them.
        param: its sampling parameters, temperature above 0.
        maxima: of all the rows, as `maxima_of` gives them; None where they are not known.
    """

    logits: Tensor
    row: int
    param: SamplingParams
    maxima: Tensor | None = None


class Shares:
    """Single probabilities of one row, without writing all of them: the numbers that `probs` gives."""

    def __init__(
        self, view: RowView, row: kernels.Row, measured: kernels.Measured, only_scalar: bool
    ) -> None:
        library = kernels.load()
        assert library is not None, "checked by can_run"
        self._library = library
        self._read = view  # the kernels read its memory
        self._row, self._measured, self._only_scalar = row, measured, only_scalar

    def __getitem__(self, token: int) -> float:
        if not 0 <= token < self._row.width:
            raise IndexError(f"token {token} of {self._row.width}")
        share: float = self._library.pl_share_of(self._row, self._measured, token)
        return share

    def draw(self, noise: float, without: Sequence[int] = ()) -> int | None:
        """The token at which the running sum of shares passes `noise` times their total; None if nothing is left.

        Args:
            noise: in (0, 1).
            without: distinct tokens that are left out.
        """
        if not all(0 <= token < self._row.width for token in without):
            raise IndexError(f"tokens {list(without)} of {self._row.width}")
        left_out = (ctypes.c_int64 * len(without))(*without)
        place: int = self._library.pl_draw(
            self._row, self._measured, noise, self._only_scalar, left_out, len(without)
        )
        return None if place < 0 else place


def measure(views: Sequence[RowView], only_scalar: bool = False) -> list[Shares | None]:
    """Prepare rows for questions about single probabilities, all of them at the same time.

    Args:
        views: the rows, of one tensor or several.
        only_scalar: as in `choose`.

    Returns:
        One for each, or None for a row without a finite largest logit, which has no probabilities.
    """
    library = kernels.load()
    assert library is not None, "checked by can_run"
    count = len(views)
    described, measured = (kernels.Row * count)(), (kernels.Measured * count)()
    counts = (ctypes.c_int64 * count)()
    for row, view in zip(described, views, strict=True):
        _describe(row, _places(view.logits, view.maxima, [view.row])[0], view.logits.shape[1], view.param)
    where = ctypes.addressof(measured), ctypes.addressof(counts)
    library.pl_measure(described, count, torch.get_num_threads(), only_scalar, *where)
    return [
        None if found < 0 else Shares(view, row, own, only_scalar)
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
    for row, place, param in zip(described, _places(logits, maxima, range(len(params))), params, strict=True):
        _describe(row, place, logits.shape[1], param)
    function(
        described, len(params), torch.get_num_threads(), only_scalar, out.data_ptr(), ctypes.addressof(counts)
    )
    return None if any(count < 0 for count in counts) else out


def _choose(described: ctypes.Array[kernels.Row], only_scalar: bool) -> list[int | None]:
    library = kernels.load()
    assert library is not None, "checked by can_run"
    chosen = (ctypes.c_int64 * len(described))()
    library.pl_choose(
        described, len(described), torch.get_num_threads(), only_scalar, ctypes.addressof(chosen)
    )
    return [None if place < 0 else place for place in chosen]


def _checked_ids(token_ids: Tensor | None, width: int) -> Tensor | None:
    """Target ids of places, dense; checked, because the kernels would not notice."""
    if token_ids is None:
        return None
    if token_ids.shape != (width,) or token_ids.dtype != torch.int64 or token_ids.is_cuda:
        raise ValueError(f"{list(token_ids.shape)} {token_ids.dtype} ids for rows of {width}")
    return token_ids.contiguous()


def _describe(row: kernels.Row, place: tuple[int, int | None], width: int, param: SamplingParams) -> None:
    """Fill in everything but the key."""
    (row.logits, row.maxima), row.ids, row.width = place, None, width
    row.top_k, row.top_p = param.top_k, param.top_p
    row.temperature = max(param.temperature, _SMALLEST_TEMPERATURE)
    row.floor = math.log(param.min_p) if param.min_p > 0 else _LOWEST


def _places(logits: Tensor, maxima: Tensor | None, at: Sequence[int]) -> list[tuple[int, int | None]]:
    """Where rows and their maxima begin in memory."""
    pointers = _pointers(logits, at)
    if maxima is None:
        return [(pointer, None) for pointer in pointers]
    _check_maxima(logits, maxima)
    return list(zip(pointers, _pointers(maxima, at), strict=True))


def _check_maxima(logits: Tensor, maxima: Tensor) -> None:
    wanted = (logits.shape[0], -(-logits.shape[1] // SET))
    if maxima.shape != wanted or maxima.dtype != torch.float32 or maxima.stride(1) != 1 or maxima.is_cuda:
        raise ValueError(
            f"maxima are {maxima.dtype} {list(maxima.shape)} where rows of float32 {list(wanted)} belong"
        )


def _pointers(rows: Tensor, at: Sequence[int]) -> list[int]:
    """Where rows begin in memory; checked, because the kernels would not notice."""
    base, stride, count = rows.data_ptr(), rows.stride(0) * rows.element_size(), rows.shape[0]
    for index in at:
        if not 0 <= index < count:
            raise IndexError(f"row {index} of {count}")
    return [base + index * stride for index in at]


def _key(seed: int, position: int, role: NoiseRole) -> kernels.NoiseKey:
    return kernels.NoiseKey(seed & _MASK_64, position & _MASK_64, role)
