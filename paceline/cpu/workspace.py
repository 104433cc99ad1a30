"""Memory that a program works in: its own buffers, scratch rows and attention scores, grown to what runs need."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

SPARE_ROWS = 8  # a product may read so many rows behind the last
MAX_GROUP = 16  # query heads per key head


class Workspace:
    """Memory of one program.

    Attributes:
        pointers: to the buffers, by index; null where the caller binds one.
        scratch: bfloat16, normed rows on their way into a product.
        scores: float32, of attention, shared out to the threads.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._buffers: list[Tensor] = []
        self.pointers: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * 0)()
        self.scratch = torch.empty(0, dtype=torch.bfloat16)
        self.scores = torch.empty(0)

    def reserve(
        self, num_rows: int, longest: int, widths: Mapping[int, int], num_buffers: int, widest: int
    ) -> None:
        """Grow to runs of so many rows; what is grown moves.

        Args:
            num_rows: rows of a run.
            longest: cache rows of the longest sequence.
            widths: of the program's own buffers, by index.
            num_buffers: own and bound ones.
            widest: widest rows that a product reads.
        """
        stride = (max(longest, 1) + 32) * MAX_GROUP
        if self.scores.numel() < stride * torch.get_num_threads():
            self.scores = torch.empty(2 * stride * torch.get_num_threads())
        if num_rows <= self._num_rows:
            return
        self._num_rows = max(16, num_rows)
        readable = self._num_rows + SPARE_ROWS
        self._buffers, self.pointers = [], (ctypes.c_void_p * num_buffers)()
        for index, width in widths.items():
            self._buffers.append(torch.zeros(readable, width, dtype=torch.bfloat16))
            self.pointers[index] = self._buffers[-1].data_ptr()
        self.scratch = torch.zeros(readable * widest, dtype=torch.bfloat16)
