"""What an operation of a program does: the numbers that `kernels/program.h` gives its kinds and epilogues."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an operation does; the order of `program.h`."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTEND = 3
    GATHER = 4
    COPY = 5
    TOP = 6


class Epilogue(IntEnum):
    """What follows a product before its result is stored; the order of `program.h`."""

    STORE = 0
    ADD = 1
    GATE_SILU = 2
    GATE_GELU = 3
    STORE_FLOAT = 4
