"""A model as a list of operations over buffers of rows, run by the CPU kernels in one call a step.

A program builds the list and describes a step's rows to the kernels. It does not know architectures: executors and
draft layers say which operation follows which. One call a step means one release of the interpreter lock and no
operator dispatch, so that nearly all of a step's time is the reading of weights.

Rows are bfloat16, sums float32. A row's result does not depend on the rows beside it (see `kernels/simd.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.cpu import kernels
from paceline.cpu.operation import Epilogue, Kind
from paceline.cpu.packed_weight import PackedWeight, num_panels
from paceline.cpu.row_segment import RowSegment, describe_segments, longest_of
from paceline.cpu.workspace import Workspace

MAX_TOP = 16
RESIDENT_BYTES = 24 << 20
"""Weights up to this size should stay in the last cache from one run to the next: a draft layer's."""

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Description:
    """A run as the kernels take it.

    Attributes:
        step: read by the kernels.
        kept: objects that `step` points into.
    """

    step: kernels.Step
    kept: list[object]


class Program:
    """Operations and their buffers. Not thread-safe."""

    def __init__(self) -> None:
        library = kernels.load()
        if library is None:
            raise RuntimeError(
                "the CPU kernels are not built, or do not run on this processor: choose another executor"
            )
        self._library = library
        self._ops: list[kernels.Op] = []
        self._array: ctypes.Array[kernels.Op] | None = None
        self._widths: list[int] = []
        self._bound: set[int] = set()
        self._own_widths: dict[int, int] = {}  # of buffers that are not bound
        self._widest = 0  # of rows that products read
        self._kept: list[object] = []  # tensors that operations point into
        self._workspace = Workspace()
        self._num_positions = _NO_LIMIT  # of the shortest rope table
        self._num_tokens = _NO_LIMIT  # of the embedding
        self._weight_bytes = 0

    def buffer(self, width: int, *, bound: bool = False) -> int:
        """A buffer of rows `width` wide; the caller gives a bound buffer at each run."""
        self._widths.append(width)
        if bound:
            self._bound.add(len(self._widths) - 1)
        else:
            self._own_widths[len(self._widths) - 1] = width
        self._workspace = Workspace()
        return len(self._widths) - 1

    def _add(self, kind: Kind, source: int, out: int, **fields: object) -> None:
        op = kernels.Op(kind=kind, in_buffer=source, out_buffer=out, residual=-1, maxima=-1)
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self._kept.append(value)
                value = value.data_ptr()
            setattr(op, name, value)
        op.in_width = self._widths[source] if source >= 0 else 0
        op.out_width = self._widths[out]
        op.in_is_bound = source in self._bound
        self._ops.append(op)
        self._array = None

    def embed(self, table: Tensor, out: int, scale: float = 1.0) -> None:
        """Rows of `table` `[vocab, width]` by token."""
        self._num_tokens = min(self._num_tokens, table.shape[0])
        self._add(Kind.EMBED, -1, out, weight=table, scale=scale)

    def norm(
        self, source: int, out: int, weight: Tensor, eps: float, *, residual: int = -1, offset: int = 0
    ) -> None:  # fmt: skip
        """Norm of `source` into the columns of `out` from `offset` on, plus a buffer of the same width."""
        self._add(
            Kind.NORM, source, out, norm=weight, eps=eps, residual=residual, out_offset=offset
        )  # fmt: skip

    def linear(
        self, source: int, out: int, weight: PackedWeight, epilogue: Epilogue = Epilogue.STORE, *,
        norm: Tensor | None = None, eps: float = 0.0, residual: int = -1, maxima: int = -1, selected: bool = False,
    ) -> None:  # fmt: skip
        """Product with a weight, of the norm of the rows if one is given, then its epilogue.

        With `STORE_FLOAT` a bound float32 buffer `maxima` gets the largest of the columns of every panel.
        """
        assert maxima < 0 or (epilogue is Epilogue.STORE_FLOAT and maxima in self._bound)
        assert maxima < 0 or self._widths[maxima] == num_panels(weight.out_width)
        assert self._widths[source] == weight.in_width
        assert self._widths[out] == weight.out_width
        assert weight.is_gated == (epilogue in (Epilogue.GATE_SILU, Epilogue.GATE_GELU))
        self._weight_bytes += weight.panels.nbytes
        self._widest = max(self._widest, weight.in_width)
        extra = {"norm": norm, "bias": weight.bias}
        self._add(
            Kind.LINEAR, source, out, weight=weight.panels, epilogue=epilogue, eps=eps, residual=residual,
            maxima=maxima, on_selected=selected, **{name: value for name, value in extra.items() if value is not None},
        )  # fmt: skip

    def attend(
        self, source: int, out: int, layer: int, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float,
        rope: Tensor, window: int | None = None, qk_norm: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """Rotate queries and keys of `source` (in place), store keys and values, and attend.

        Args:
            source: rows `[num_heads + 2 * num_kv_heads, head_dim]`, query heads group-major.
            out: rows `[num_heads, head_dim]`, group-major.
            layer: layer of the cache.
            num_heads: query heads.
            num_kv_heads: key heads.
            head_dim: width of a head.
            scale: on the scores.
            rope: `[positions, 2, head_dim]` bfloat16, cosine and signed sine.
            window: tokens a row sees, itself included; None for all.
            qk_norm: `[num_heads + num_kv_heads, head_dim]`, norm of each head before rotation.
            eps: of that norm.
        """
        self._num_positions = min(self._num_positions, rope.shape[0])
        extra = {} if qk_norm is None else {"norm": qk_norm}
        self._add(
            Kind.ATTEND, source, out, layer=layer, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, scale=scale, rope=rope, window=window or 0, eps=eps, **extra,
        )  # fmt: skip

    def gather(self, source: int, out: int) -> None:
        """The selected rows of `source`."""
        self._add(Kind.GATHER, source, out)

    def copy(self, source: int, out: int) -> None:
        """All rows of `source` as they are now."""
        self._add(Kind.COPY, source, out)

    def top(self, source: int, out: int, count: int) -> None:
        """The likeliest entries of each selected row of `source`, a bound buffer of float32 logits.

        Args:
            source: the logits.
            out: a bound buffer `2 * count` wide: int32 indices, best first, then the float32 bits of their
                log-probabilities.
            count: how many, at most as many as there are.
        """
        assert 1 <= count <= min(MAX_TOP, self._widths[source])
        assert self._widths[out] == 2 * count
        self._add(Kind.TOP, source, out, count=count, on_selected=True)

    def run(
        self,
        segments: Sequence[RowSegment],
        positions: Sequence[int],
        bound: Mapping[int, Tensor],
        *,
        tokens: Sequence[int] = (),
        selected: Sequence[int] = (),
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all operations over some rows.

        Args:
            segments: rows of each sequence, in row order; rows behind the last are padding.
            positions: of the rows, for rotation.
            bound: tensors of the bound buffers, dense, at least as many rows as are read or written.
            tokens: of the rows, for `embed`.
            selected: rows for operations on selected rows.
            on_begin: called once everything is described, right before the kernels run without the interpreter lock.

        Raises:
            IndexError: a token, a position or a cache row is out of range; the kernels do not check.
            ValueError: a bound tensor is not rows of its buffer's width.
        """
        self.reserve(max(len(positions), len(selected)), longest_of(segments))
        description = self.describe(segments, positions, bound, tokens=tokens, selected=selected)
        operations = self.operations
        on_begin()
        self._library.pl_run(operations, len(self._ops), description.step)

    def grow(self, first: Description | None, passes: Description, forest: kernels.Forest) -> None:
        """Grow trees, after a first run if there is one; see `growth.py`.

        Raises:
            IndexError: the program cannot run a token of a tree.
            MemoryError: there is no memory to describe the passes.
        """
        before = None if first is None else first.step
        failure = self._library.pl_grow(self.operations, len(self._ops), before, passes.step, forest)
        if failure == kernels.NO_MEMORY:
            raise MemoryError("no memory to describe the passes of a draft")
        if failure:
            raise IndexError(f"a drafted token is not within 0..{self._num_tokens - 1}")

    def check_positions(self, positions: Sequence[int]) -> None:
        """Raise IndexError if a position is not in the shortest rope table."""
        _check_range("position", positions, self._num_positions)

    @property
    def num_tokens(self) -> int:
        """Tokens that the program can run: rows of the smallest table of embeddings."""
        return self._num_tokens

    @property
    def operations(self) -> ctypes.Array[kernels.Op]:
        """All operations, in order."""
        if self._array is None:
            self._array = (kernels.Op * len(self._ops))(*self._ops)
        return self._array

    def reserve(self, num_rows: int, longest: int) -> None:
        """Get memory for runs of so many rows over so many cache rows; it moves what earlier descriptions point to."""
        self._workspace.reserve(num_rows, longest, self._own_widths, len(self._widths), self._widest)

    def describe(
        self,
        segments: Sequence[RowSegment],
        positions: Sequence[int],
        bound: Mapping[int, Tensor],
        *,
        tokens: Sequence[int] = (),
        selected: Sequence[int] = (),
    ) -> Description:
        """Describe a run to the kernels, once there is room for it; see :meth:`run`."""
        num_rows = len(positions)
        self.check_positions(positions)
        if self._num_tokens < _NO_LIMIT and len(tokens) != num_rows:
            raise IndexError(f"{len(tokens)} tokens for {num_rows} rows")
        _check_range("token", tokens, self._num_tokens)
        _check_range("selected row", selected, num_rows)
        if sum(segment.num_rows for segment in segments) > num_rows:
            raise IndexError(f"the segments have more rows than the {num_rows} positions")
        for segment in segments:
            if segment.write_at + segment.num_rows > segment.storage.shape[2]:
                raise IndexError(f"{segment.num_rows} rows at {segment.write_at} do not fit their slot")
        num_threads = torch.get_num_threads()
        described, row_segment, paths = describe_segments(segments, num_rows)
        space = self._workspace
        pointers = type(space.pointers).from_buffer_copy(space.pointers)
        for index in self._bound:
            tensor, width = bound[index], self._widths[index]
            if not tensor.is_contiguous() or tensor.shape[1] != width:
                raise ValueError(f"buffer {index} is {list(tensor.shape)}, not dense rows of {width}")
            pointers[index] = tensor.data_ptr()
        indices = np.array([*tokens, *positions, *selected], dtype=np.int64)
        step = kernels.Step(
            num_rows=num_rows,
            num_selected=len(selected),
            num_segments=len(segments),
            tokens=indices.ctypes.data,
            positions=indices.ctypes.data + 8 * len(tokens),
            selected=indices.ctypes.data + 8 * (len(tokens) + num_rows),
            row_segment=row_segment.ctypes.data,
            segments=described,
            buffers=ctypes.addressof(pointers),
            scratch=space.scratch.data_ptr(),
            scores=space.scores.data_ptr(),
            scores_stride=space.scores.numel() // num_threads,
            num_threads=num_threads,
            is_resident=self._weight_bytes <= RESIDENT_BYTES,
        )
        return Description(step, [described, row_segment, paths, dict(bound), pointers, indices])


def _check_range(what: str, indices: Sequence[int], size: int) -> None:
    if indices and (min(indices) < 0 or max(indices) >= size):
        raise IndexError(f"{what}s {min(indices)}..{max(indices)} are not all within 0..{size - 1}")
