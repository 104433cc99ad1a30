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
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.sampling import kernels
from paceline.sampling.noise import NoiseRole
from paceline.sampling.params import SamplingParams

_MASK_64 = 2**64 - 1
_LOWEST = -torch.finfo(torch.float32).max  # below it is only -inf, which no race is won with
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
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


def choose(
    logits: Tensor,
    at: Sequence[int],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    only_scalar: bool = False,
) -> list[int | None]:
    """The winners of the coupled races of some rows, filters applied.

    Args:
        logits: `[rows, vocab]` that `can_run`.
        at: the rows that are to choose.
        positions: absolute position of the token that each of them chooses.
        params: sampling parameters of each, temperature above 0.
        only_scalar: for tests: the plain C form, whatever the processor has.

    Returns:
        A token id for each, or None for a row without a finite largest logit.
    """
    described = (kernels.Row * len(at))(
        *(
            _row(logits, index, param, _key(param.seed, position, NoiseRole.TARGET))
            for index, position, param in zip(at, positions, params, strict=True)
        )
    )
    return _choose(described, only_scalar)


def race(
    processed: Tensor,
    positions: Sequence[int],
    seeds: Sequence[int],
    token_ids: Tensor | None,
    only_scalar: bool = False,
) -> list[int | None]:
    """The winners' places in rows that are processed already; `token_ids`: `[vocab]` int64, whose noise a place has."""
    ids = None if token_ids is None else token_ids.contiguous()
    pointer = 0 if ids is None else ids.data_ptr()
    described = (kernels.Row * len(positions))(
        *(
            kernels.Row(
                *(_pointer(processed, index), pointer, processed.shape[1], 0, 1.0),
                *(_key(seed, position, NoiseRole.TARGET), 1.0, _LOWEST),
            )
            for index, (position, seed) in enumerate(zip(positions, seeds, strict=True))
        )
    )
    return _choose(described, only_scalar)


def process(logits: Tensor, params: Sequence[SamplingParams], only_scalar: bool = False) -> Tensor | None:
    """What `processors.process_logits` gives for rows with a temperature above 0; None where a row has no finite
    largest logit."""
    out = torch.empty(logits.shape, dtype=torch.float32)
    counts = (ctypes.c_int64 * len(params))()
    described = (kernels.Row * len(params))(
        *(_row(logits, index, param, kernels.NoiseKey()) for index, param in enumerate(params))
    )
    library = kernels.load()
    assert library is not None, "checked by can_run"
    library.pl_process(
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


def _row(logits: Tensor, index: int, param: SamplingParams, key: kernels.NoiseKey) -> kernels.Row:
    return kernels.Row(
        *(_pointer(logits, index), 0, logits.shape[1], param.top_k, param.top_p, key),
        max(param.temperature, _SMALLEST_TEMPERATURE),
        math.log(param.min_p) if param.min_p > 0 else _LOWEST,
    )


def _pointer(rows: Tensor, index: int) -> int:
    if not 0 <= index < rows.shape[0]:
        raise IndexError(f"row {index} of {rows.shape[0]}")
    return rows.data_ptr() + index * rows.stride(0) * rows.element_size()


def _key(seed: int, position: int, role: NoiseRole) -> kernels.NoiseKey:
    return kernels.NoiseKey(seed & _MASK_64, position & _MASK_64, role)
