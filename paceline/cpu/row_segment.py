"""The rows of one sequence in a run of the kernels: where its cache is, and what each row sees of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.cpu import kernels


@dataclass(frozen=True, slots=True)
class RowSegment:
    """The rows of one sequence in a run.

    Attributes:
        storage: its cache `[layers, 2 * kv_heads, capacity, head_dim]`, keys first, inner axes dense.
        num_rows: how many.
        write_at: cache row of the first.
        past: cache rows that every row of a tree sees; unused for a chain.
        paths: the cache rows that each row sees behind `past`, less `past`, itself last. None for a chain, whose rows
            see everything up to themselves.
    """

    storage: Tensor
    num_rows: int
    write_at: int
    past: int = 0
    paths: Sequence[Sequence[int]] | None = None


def longest_of(segments: Sequence[RowSegment]) -> int:
    """Cache rows up to the last one that any segment writes."""
    return max((segment.write_at + segment.num_rows for segment in segments), default=0)


def describe_segment(segment: RowSegment, entry: kernels.KernelSegment) -> None:
    """Fill in an entry for the kernels, except its first row and its paths."""
    entry.num_rows, entry.past, entry.write_at = segment.num_rows, segment.past, segment.write_at
    entry.cache = segment.storage.data_ptr()
    entry.layer_stride, entry.head_stride = segment.storage.stride(0), segment.storage.stride(1)


def describe_segments(
    segments: Sequence[RowSegment], num_rows: int
) -> tuple[ctypes.Array[kernels.KernelSegment], npt.NDArray[np.int32], list[npt.NDArray[np.int32]]]:
    """Describe the segments of a run with so many rows.

    Returns:
        The segments as the kernels take them, the segment of each row (-1 for padding), and the paths that the
        segments point into.
    """
    described = (kernels.KernelSegment * max(1, len(segments)))()
    row_segment = np.full(num_rows, -1, dtype=np.int32)
    kept: list[npt.NDArray[np.int32]] = []
    first = 0
    for index, segment in enumerate(segments):
        entry = described[index]
        describe_segment(segment, entry)
        entry.first_row = first
        if segment.paths is not None:
            starts = np.array([0, *accumulate(map(len, segment.paths))], dtype=np.int32)
            paths = np.array([*chain.from_iterable(segment.paths)], dtype=np.int32)
            entry.paths, entry.path_starts = paths.ctypes.data, starts.ctypes.data
            kept += (paths, starts)
        row_segment[first : first + segment.num_rows] = index
        first += segment.num_rows
    return described, row_segment, kept
