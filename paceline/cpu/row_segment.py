"""The rows of one sequence in a run of the kernels: where its cache is, and what each row sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
