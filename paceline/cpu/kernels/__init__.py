"""The CPU kernels: C sources beside this file, compiled when the package is installed, loaded here.

Finds the compiled library, checks that it fits this processor and these structures, and declares its functions. It does
not know models.

The library is optional: where no C compiler was at hand or the processor lacks the bfloat16 dot product (AVX-512 BF16:
Intel since Cooper Lake, AMD since Zen 4), `load` returns None and the engine runs on torch's own operators.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime must be in the process before the library that shares it

from paceline.native_library import check_build, open_library

LIBRARY_STEM = "_rows"
PROGRAM_VERSION = 4  # of `program.h`
NO_MEMORY = 2  # of `program.h`: what `pl_grow` returns


class Op(ctypes.Structure):
    """`struct op` of `program.h`."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "in_buffer", "out_buffer", "residual", "epilogue", "layer")),
        *((name, c_int32) for name in ("on_selected", "num_heads", "num_kv_heads", "head_dim", "window")),
        *((name, c_int32) for name in ("in_is_bound", "count", "maxima")),
        *((name, c_int64) for name in ("in_width", "out_width", "out_offset")),
        *((name, c_float) for name in ("eps", "scale")),
        *((name, c_void_p) for name in ("weight", "norm", "bias", "rope")),
    ]


class KernelSegment(ctypes.Structure):
    """`struct segment` of `program.h`."""

    _fields_ = [
        *((name, c_int64) for name in ("first_row", "num_rows", "past", "write_at")),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "head_stride")),
        *((name, c_void_p) for name in ("paths", "path_starts")),
    ]


class Step(ctypes.Structure):
    """`struct step` of `program.h`."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_selected", "num_segments")),
        *((name, c_void_p) for name in ("tokens", "positions", "selected", "row_segment")),
        ("segments", POINTER(KernelSegment)),
        *((name, c_void_p) for name in ("buffers", "scratch", "scores")),
        ("scores_stride", c_int64),
        ("num_threads", c_int32),
        ("is_resident", c_int32),
    ]


class Tree(ctypes.Structure):
    """`struct tree` of `program.h`."""

    _fields_ = [
        *((name, c_int32) for name in ("depth", "width", "branch", "num_nodes", "num_rows", "num_newest")),
        ("position", c_int64),
        *((name, c_void_p) for name in ("ranked", "state")),
        ("segment", KernelSegment),
        *((name, c_void_p) for name in ("tokens", "log_probs", "scores", "row_nodes", "states")),
    ]


class Forest(ctypes.Structure):
    """`struct forest` of `program.h`."""

    _fields_ = [
        ("num_trees", c_int64),
        ("trees", POINTER(Tree)),
        ("token_of", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "width")),
        *((name, c_int32) for name in ("in_buffer", "out_buffer", "best", "num_best")),
    ]


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it was not built or this processor cannot run it.

    Raises:
        RuntimeError: the library was built for another version of this package.
    """
    library = open_library(Path(__file__).parent, LIBRARY_STEM, "cpu_kernels")
    if library is None:
        return None
    library.pl_is_supported.restype = c_int32
    library.pl_built_as.argtypes, library.pl_built_as.restype = (c_int32,), c_int64
    library.pl_pack.argtypes = (c_void_p, c_int64, c_int64, c_int32, c_void_p)
    library.pl_pack.restype = None
    library.pl_run.argtypes, library.pl_run.restype = (POINTER(Op), c_int64, POINTER(Step)), None
    library.pl_grow.argtypes = (POINTER(Op), c_int64, POINTER(Step), POINTER(Step), POINTER(Forest))
    library.pl_grow.restype = c_int32
    if not library.pl_is_supported():
        return None
    facts = [
        PROGRAM_VERSION,
        *(ctypes.sizeof(structure) for structure in (Op, KernelSegment, Step, Tree, Forest)),
    ]
    check_build(library, "cpu_kernels", library.pl_built_as, facts)
    return library
