"""The sampling kernels: C sources beside this file, compiled when the package is installed, loaded here.

Responsible for: finding the compiled library, checking that it fits these structures, and naming its functions.
Deliberately does not know: tensors. Called by `paceline.sampling.rows`.

The library is optional: if it was not built, `load` returns None and torch's operators give the same bits,
slower. It has one form in plain C and one for AVX-512, and chooses by the processor.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime must be in the process before the library that shares it

from paceline.native_library import check_build, open_library

LIBRARY_STEM = "_choose"
KERNELS_VERSION, KERNELS_REVISION = 5, 2  # of `choose.c`


class NoiseKey(ctypes.Structure):
    """`struct noise_key` of `noise.h`."""

    _fields_ = [("seed", c_uint64), ("position", c_uint64), ("role", c_uint32)]


class Row(ctypes.Structure):
    """`struct row` of `choose.c`."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "ids", "maxima")),
        *((name, c_int64) for name in ("width", "top_k")),
        ("top_p", c_double),
        ("key", NoiseKey),
        *((name, c_float) for name in ("temperature", "floor")),
    ]


class Measured(ctypes.Structure):
    """`struct measured` of `choose.c`."""

    _fields_ = [*((name, c_float) for name in ("top", "temperature", "floor")), ("total", c_int64)]


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it was not built or cannot be loaded.

    Raises:
        RuntimeError: the library was built for another version of this package.
    """
    library = open_library(Path(__file__).parent, LIBRARY_STEM, "sampling_kernels")
    if library is None:
        return None
    library.pl_noise_built_as.argtypes, library.pl_noise_built_as.restype = (c_int32,), c_int64
    facts = [KERNELS_VERSION, ctypes.sizeof(Row), ctypes.sizeof(Measured), KERNELS_REVISION]
    check_build(library, "sampling_kernels", library.pl_noise_built_as, facts)
    library.pl_choose.argtypes = (POINTER(Row), c_int64, c_int32, c_int32, c_void_p)
    library.pl_choose.restype = None
    library.pl_rank.argtypes = (
        POINTER(Row),
        c_int64,
        c_int64,
        c_int32,
        c_int32,
        c_void_p,
        c_void_p,
        c_void_p,
    )
    library.pl_rank.restype = None
    library.pl_largest.argtypes = (
        *(c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64),
        *(c_int32, c_int32, c_void_p),
    )
    library.pl_largest.restype = None
    library.pl_process.argtypes = (POINTER(Row), c_int64, c_int32, c_int32, c_void_p, c_void_p)
    library.pl_process.restype = None
    library.pl_share.argtypes = library.pl_process.argtypes
    library.pl_share.restype = None
    library.pl_measure.argtypes = library.pl_process.argtypes
    library.pl_measure.restype = None
    library.pl_share_of.argtypes = (POINTER(Row), POINTER(Measured), c_int64)
    library.pl_share_of.restype = c_double
    library.pl_draw.argtypes = (POINTER(Row), POINTER(Measured), c_double, c_int32, POINTER(c_int64), c_int64)
    library.pl_draw.restype = c_int64
    library.pl_uniform.argtypes = (c_uint64, c_uint64, c_uint32, c_uint32)
    library.pl_uniform.restype = c_double
    library.pl_gumbel.argtypes = (c_uint64, c_uint64, c_uint32, c_void_p, c_int64, c_void_p)
    library.pl_gumbel.restype = None
    return library
