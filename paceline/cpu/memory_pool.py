"""Memory that is committed once, before anything waits for it, and pieces of it.

A pool faults one range in, within a limit of time, hands pieces of it out and takes them back. The operating system
gives a page when it is first written. For 4 MiB of keys and values, the slot of one short text, that took 1 to 2 ms in
the step that wrote them, and again for the next text after the slot had been freed. Pieces of a pool have their pages,
huge ones where the system gives them. The pool does not know what a piece holds and does not clear it.

Called by the key-value cache on CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.cpu.huge_pages import Advice, advise
from paceline.target.kv.cache import COMMIT_LIMIT_S

_HUGE_PAGE = 2 << 20
_PAGE = 4096
_PORTION = 16 << 20  # faulted in between two looks at the clock


class MemoryPool:
    """One range of memory, and which parts of it are free. Not thread-safe.

    Args:
        num_bytes: its size.
        limit_s: most seconds to spend on faulting it in.
        clock: seconds.

    Attributes:
        num_bytes: its size.
        num_faulted_bytes: bytes, from its beginning, that had their pages when the pool was made.
    """

    def __init__(
        self,
        num_bytes: int,
        limit_s: float = COMMIT_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_bytes < 0:
            raise ValueError(f"num_bytes of a pool must be at least 0, not {num_bytes}")
        self.num_bytes = num_bytes
        # numpy asks the allocator for zeroed pages, which nothing has touched yet.
        memory = np.zeros(num_bytes + _HUGE_PAGE, dtype=np.uint8)
        first = -memory.ctypes.data % _HUGE_PAGE
        self._memory = torch.from_numpy(memory[first : first + num_bytes])
        self._free = {0: num_bytes} if num_bytes else {}  # size by beginning; no two touch
        self._taken: dict[int, int] = {}
        self.num_faulted_bytes = _fault_in(self._memory, limit_s, clock)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are in no piece; the largest hole may be smaller."""
        return sum(self._free.values())

    def take(self, num_bytes: int) -> Tensor | None:
        """A piece `[num_bytes]` uint8 that begins at a page, not cleared; None where no hole is large enough.

        The smallest hole that is large enough is cut, so that large holes stay.
        """
        size = -(-num_bytes // _PAGE) * _PAGE
        holes = [(hole, first) for first, hole in self._free.items() if hole >= size]
        if not holes or num_bytes <= 0:
            return None
        hole, first = min(holes)
        del self._free[first]
        if hole > size:
            self._free[first + size] = hole - size
        self._taken[first] = size
        return self._memory[first : first + num_bytes]

    def give_back(self, piece: Tensor) -> None:
        """Take a piece back; a view of it that is still held shows what is stored there next."""
        first = piece.data_ptr() - self._memory.data_ptr()
        size = self._taken.pop(first)
        if (after := self._free.pop(first + size, None)) is not None:
            size += after
        before = next((begin for begin, hole in self._free.items() if begin + hole == first), None)
        if before is None:
            self._free[first] = size
        else:
            self._free[before] += size


def _fault_in(memory: Tensor, limit_s: float, clock: Callable[[], float]) -> int:
    """Write-fault memory from its beginning until a time limit; returns the bytes that have their pages."""
    num_bytes, address = memory.numel(), memory.data_ptr()
    if not num_bytes:
        return 0
    advise(address, num_bytes, Advice.HUGE_PAGES)
    ends_at = clock() + limit_s
    for first in range(0, num_bytes, _PORTION):
        if clock() >= ends_at:
            return first
        size = min(_PORTION, num_bytes - first)
        if not advise(address + first, size, Advice.POPULATE):  # before Linux 5.14
            memory[first : first + size : _PAGE] = 0
    return num_bytes
