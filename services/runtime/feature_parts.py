"""Features whose columns are read over windows of different length: only rows that a drafter reads are sent.

A drafter that reads the target's cached keys and values needs some layers of every position, others of a window, and
the hidden state of the newest position alone. Responsible for: cutting rows into the parts that are sent, and joining
the parts again with NaN in place of rows that were not sent. Deliberately does not know: sequences, streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.contract.errors import InvalidRequestError
from paceline.target import TapPart
from paceline.v1 import peer_pb2


def tap_parts(tap: peer_pb2.FeatureTap) -> tuple[TapPart, ...]:
    """The columns of a tap in order, as in `TapSpec.parts`.

    Raises:
        InvalidRequestError: the widths do not add up to the tap's.
    """
    if not tap.cached_layers:
        return (TapPart(tap.width, 0),)
    layers = [TapPart(2 * one.num_kv_heads * one.head_dim, one.window) for one in tap.cached_layers]
    own = tap.width - sum(part.width for part in layers)
    if own < 0 or any(part.width < 1 for part in layers):
        raise InvalidRequestError("tap.cached_layers", f"does not fit a width of {tap.width}")
    return (TapPart(own, 1), *layers)


def cut(rows: Tensor, parts: Sequence[TapPart], num_behind: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The parts of some positions' features that are sent.

    Args:
        rows: `[n, width]`.
        parts: their columns.
        num_behind: positions after these that are sent in later chunks of the same send.

    Returns:
        The columns that are read of all positions, `[n, ...]`, and each other part of the newest rows that are read of
        it, which may be none.
    """
    if not any(part.reach for part in parts):
        return rows, []
    columns = rows.split([part.width for part in parts], dim=1)
    whole = [column for column, part in zip(columns, parts, strict=True) if not part.reach]
    recent = [
        column[max(len(column) - max(part.reach - num_behind, 0), 0) :]
        for column, part in zip(columns, parts, strict=True)
        if part.reach
    ]
    return torch.cat(whole, dim=1), recent


def join(whole: Tensor, recent: Sequence[Tensor | None], parts: Sequence[TapPart]) -> Tensor:
    """Join the parts of :func:`cut`: `[n, width]`, with NaN where no row was sent.

    Args:
        whole: `[n, ...]`.
        recent: the other parts, each of the newest rows; None where none was sent.
        parts: the columns.

    Raises:
        InvalidRequestError: a shape or dtype does not fit the columns.
    """
    wide = sum(part.width for part in parts if not part.reach)
    if whole.shape[1] != wide:
        raise InvalidRequestError("features", f"width {wide} expected, not {whole.shape[1]}")
    short = [part for part in parts if part.reach]
    if len(recent) != len(short):
        raise InvalidRequestError("recent", f"{len(short)} parts expected, not {len(recent)}")
    if not short:
        return whole
    rows = whole.new_full((whole.shape[0], sum(part.width for part in parts)), torch.nan)
    columns = rows.split([part.width for part in parts], dim=1)
    left, first = iter(recent), 0
    for column, part in zip(columns, parts, strict=True):
        if not part.reach:
            column.copy_(whole[:, first : first + part.width])
            first += part.width
        elif (given := next(left)) is not None:
            most = min(part.reach, whole.shape[0])
            if given.shape[1] != part.width or given.shape[0] > most or given.dtype != whole.dtype:
                expected = f"[at most {most}, {part.width}] of {whole.dtype} expected"
                raise InvalidRequestError("recent", f"{expected}, not {list(given.shape)} of {given.dtype}")
            column[len(column) - len(given) :] = given
    return rows
