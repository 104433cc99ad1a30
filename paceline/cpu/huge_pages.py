"""Advice to the operating system about memory: huge pages under weights that are loaded already.

A decode step streams all weights, and with 4 KiB pages address translation takes a part of that time. Where Linux gives
huge pages only on `madvise` (a common default), no allocator asks for them, and oneDNN allocates packed weights out of
our reach. So after loading, this file advises all large anonymous mappings of the process. Contents do not change, and
a refusal changes nothing. `paceline.target.executors.backend` calls it once per load on CPU, `memory_pool` for
memory to come.

Starting the process with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` has the same effect on glibc from the first
allocation on.
"""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from functools import cache

import structlog

log = structlog.get_logger()

MIN_MAPPING_BYTES = 4 << 20


class Advice(IntEnum):
    """Advice to Linux, by its numbers for madvise."""

    HUGE_PAGES = 14
    POPULATE = 23  # Linux 5.14: fault in for writing
    COLLAPSE = 25  # Linux 6.1: huge pages at once, instead of whenever the kernel's scanner comes by


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise.restype = ctypes.c_int
    return libc


def advise(address: int, num_bytes: int, advice: Advice) -> bool:
    """Advise about whole pages from an address on; False where the kernel refuses or does not know the advice."""
    libc = _libc()
    return libc is not None and libc.madvise(address, num_bytes, advice) == 0


def advise_huge_pages() -> int:
    """Advise all large anonymous writable mappings of this process; returns the bytes advised."""
    if _libc() is None:
        return 0
    advised = collapsed = 0
    for start, size in _large_mappings():
        if advise(start, size, Advice.HUGE_PAGES):
            advised += size
            if advise(start, size, Advice.COLLAPSE):
                collapsed += size
    log.debug("huge pages advised", advised_bytes=advised, collapsed_bytes=collapsed)
    return advised


def _large_mappings() -> list[tuple[int, int]]:
    """Start and size of anonymous private writable mappings, stacks excluded."""
    found = []
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            fields = line.split()
            name = fields[5] if len(fields) > 5 else ""
            if fields[1] != "rw-p" or (name and name != "[heap]" and not name.startswith("[anon")):
                continue
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            if end - start >= MIN_MAPPING_BYTES:
                found.append((start, end - start))
    return found
