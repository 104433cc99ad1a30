"""Choices from rows of logits on the sampling kernels: all rows in one call, without copies.

Responsible for: describing rows to the kernels, and deciding when they can be used: float32 on a CPU, library
compiled. The results are bit for bit those of the torch operators of `choices` and `noise`, which define them
and take every row that the kernels do not.

Deliberately does not know: sequences, trees, verification.

Called by: `choices`; `row_probs` for the description of rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.sampling import kernels
from paceline.sampling.noise import NoiseRole
from paceline.sampling.params import SamplingParams

_MASK_64 = 2**64 - 1
_LOWEST = -torch.finfo(torch.float32).max  # only -inf is lower, and -inf never wins a race
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
SET = 32  # consecutive logits for which one maximum may be known; as in `passes.h`
_MAX_WIDTH = 2**22  # above, the masses of a nucleus could overflow 63 bits


def can_run(logits: Tensor) -> bool:
    """Whether the kernels accept these rows: `[rows, vocab]` float32 in CPU memory."""
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.dim() == 2
        and logits.stride(1) == 1
        and 0 < logits.shape[1] <= _MAX_WIDTH
        and not logits.requires_grad
        and kernels.load() is not None
    )


def loaded_kernels() -> ctypes.CDLL:
    """The library; call it only for rows that `can_run`."""
    library = kernels.load()
    assert library is not None, "checked by can_run"
    return library


def maxima_of(logits: Tensor) -> Tensor:
    """The largest of every 32 logits: `[rows, vocab] -> [rows, ceil(vocab / 32)]` float32, NaN where one of them
    is NaN.
    """
    padded = F.pad(logits, (0, -logits.shape[1] % SET), value=-math.inf)
    return padded.view(logits.shape[0], -1, SET).amax(dim=-1)


def largest(logits: Tensor, maxima: Tensor, only_scalar: bool = False) -> list[int]:
    """The index of each row's largest logit, the first of equals; NaN counts as the largest.

    Args:
        logits: `[rows, vocab]` that `can_run`.
        maxima: of all rows, as `maxima_of` gives them.
        only_scalar: as in `choose`.
    """
    num_rows, width = logits.shape
    _check_maxima(logits, maxima)
    found = (ctypes.c_int64 * num_rows)()
    loaded_kernels().pl_largest(
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
    """The winners of the coupled races of some rows, after filters.

    Args:
        logits: `[rows, vocab]` that `can_run`.
        at: the rows that choose.
        positions: absolute position of the token that each of them chooses.
        params: sampling parameters of each, temperature above 0.
        only_scalar: for tests: use the plain C form on any processor.
        maxima: of all rows, as `maxima_of` gives them; None where unknown.

    Returns:
        A token id for each, or None for a row without a finite largest logit.
    """
    described = (kernels.Row * len(at))()
    for row, pointer, position, param in zip(
        described, row_pointers(logits, maxima, at), positions, params, strict=True
    ):
        describe(row, pointer, logits.shape[1], param)
        row.key = _key(param.seed, position, NoiseRole.TARGET)
    return _choose(described, only_scalar)


def race(
    processed: Tensor,
    positions: Sequence[int],
    seeds: Sequence[int],
    token_ids: Tensor | None,
    only_scalar: bool = False,
) -> list[int | None]:
    """The winning columns in rows as `row_probs.process` gives them.

    Args:
        processed: `[rows, n]` float32, filters applied.
        positions: absolute position of the token that each row chooses.
        seeds: each row's seed.
        token_ids: `[n]` int64, the target id whose noise each column gets; None where columns are target ids.
        only_scalar: as in `choose`.

    Returns:
        A column for each row, or None for a row without a finite largest logit.
    """
    ids = _checked_ids(token_ids, processed.shape[1])
    ids_pointer = 0 if ids is None else ids.data_ptr()
    described = (kernels.Row * len(positions))()
    pointers = _pointers(processed, range(len(positions)))
    for row, pointer, position, seed in zip(described, pointers, positions, seeds, strict=True):
        key = _key(seed, position, NoiseRole.TARGET)
        row.logits, row.ids, row.width, row.key = pointer, ids_pointer, processed.shape[1], key
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
    """The first columns of each row's coupled race, after filters, with the values they raced with.

    Args:
        logits: `[rows, n]` that `can_run`.
        positions: absolute position of the token that each row chooses.
        params: sampling parameters of each, temperature above 0.
        token_ids: `[n]` int64, target id of each column; None where columns are target ids.
        count: columns wanted of each row, at least 1; fewer where filters leave some row fewer.
        only_scalar: as in `choose`.

    Returns:
        Columns `[rows, count]` int64, best first, and sums of scaled logit and noise, float32; None if a row
            has no finite largest logit.
    """
    num_rows, width = logits.shape
    ids = _checked_ids(token_ids, width)
    described = (kernels.Row * num_rows)()
    for row, pointer, position, param in zip(
        described, row_pointers(logits, None, range(num_rows)), positions, params, strict=True
    ):
        describe(row, pointer, width, param)
        row.ids = 0 if ids is None else ids.data_ptr()
        row.key = _key(param.seed, position, NoiseRole.TARGET)
    columns = torch.empty(num_rows, count, dtype=torch.int64)
    sums, counts = torch.empty(num_rows, count), (ctypes.c_int64 * num_rows)()
    loaded_kernels().pl_rank(
        *(described, num_rows, count, torch.get_num_threads(), only_scalar),
        *(columns.data_ptr(), sums.data_ptr(), ctypes.addressof(counts)),
    )
    fewest = min(counts, default=0)
    return None if fewest < 0 else (columns[:, :fewest], sums[:, :fewest])


def _choose(described: ctypes.Array[kernels.Row], only_scalar: bool) -> list[int | None]:
    chosen = (ctypes.c_int64 * len(described))()
    loaded_kernels().pl_choose(
        described, len(described), torch.get_num_threads(), only_scalar, ctypes.addressof(chosen)
    )
    return [None if column < 0 else column for column in chosen]


def _checked_ids(token_ids: Tensor | None, width: int) -> Tensor | None:
    """Target ids of columns, contiguous. They are checked because the kernels do not check them."""
    if token_ids is None:
        return None
    if token_ids.shape != (width,) or token_ids.dtype != torch.int64 or token_ids.is_cuda:
        raise ValueError(
            f"{token_ids.dtype} {list(token_ids.shape)} ids for rows of {width}; pass int64 [{width}] on the CPU"
        )
    return token_ids.contiguous()


def describe(row: kernels.Row, pointers: tuple[int, int | None], width: int, param: SamplingParams) -> None:
    """Fill in everything but the noise key."""
    (row.logits, row.maxima), row.ids, row.width = pointers, None, width
    row.top_k, row.top_p = param.top_k, param.top_p
    row.temperature = max(param.temperature, _SMALLEST_TEMPERATURE)
    row.floor = math.log(param.min_p) if param.min_p > 0 else _LOWEST


def row_pointers(logits: Tensor, maxima: Tensor | None, at: Sequence[int]) -> list[tuple[int, int | None]]:
    """Addresses of rows and of their maxima."""
    pointers = _pointers(logits, at)
    if maxima is None:
        return [(pointer, None) for pointer in pointers]
    _check_maxima(logits, maxima)
    return list(zip(pointers, _pointers(maxima, at), strict=True))


def _check_maxima(logits: Tensor, maxima: Tensor) -> None:
    wanted = (logits.shape[0], -(-logits.shape[1] // SET))
    if maxima.shape != wanted or maxima.dtype != torch.float32 or maxima.stride(1) != 1 or maxima.is_cuda:
        raise ValueError(
            f"maxima are {maxima.dtype} {list(maxima.shape)}; pass contiguous rows of float32 {list(wanted)}"
        )


def _pointers(rows: Tensor, at: Sequence[int]) -> list[int]:
    """Addresses of rows. Indices are checked because the kernels do not check them."""
    base, stride, count = rows.data_ptr(), rows.stride(0) * rows.element_size(), rows.shape[0]
    for index in at:
        if not 0 <= index < count:
            raise IndexError(f"row {index} of {count} does not exist")
    return [base + index * stride for index in at]


def _key(seed: int, position: int, role: NoiseRole) -> kernels.NoiseKey:
    return kernels.NoiseKey(seed & _MASK_64, position & _MASK_64, role)
