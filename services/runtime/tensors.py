"""Dense tensors on the wire: torch to paceline.v1.Tensor and back.

Responsible for: encoding, and decoding with every check before memory is allocated: dtype, rank, each dimension,
``prod(shape) * itemsize == len(data)``, a byte cap, finite values. Deliberately does not know: what a tensor
means.

Processes that move no tensors do not import this file, since it imports torch.
"""

from __future__ import annotations

import math
import sys

import torch

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import tensor_pb2

MAX_RANK = 4

_DTYPES = {
    tensor_pb2.TENSOR_DTYPE_FLOAT32: torch.float32,
    tensor_pb2.TENSOR_DTYPE_FLOAT16: torch.float16,
    tensor_pb2.TENSOR_DTYPE_BFLOAT16: torch.bfloat16,
}
_WIRE_DTYPES = {dtype: wire for wire, dtype in _DTYPES.items()}

if sys.byteorder != "little":
    raise ImportError("the wire format is little-endian and this machine is not")


def encode(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """Encode a tensor on any device. It has 1 to 4 dimensions, none of them 0.

    Raises:
        InvalidRequestError: the message cannot hold this dtype or shape.
    """
    wire = _WIRE_DTYPES.get(tensor.dtype)
    if wire is None:
        raise InvalidRequestError("dtype", f"{tensor.dtype} has no wire format")
    if not 1 <= tensor.dim() <= MAX_RANK or tensor.numel() == 0:
        raise InvalidRequestError(
            "shape", f"{tuple(tensor.shape)} is empty or not of 1 to {MAX_RANK} dimensions"
        )
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return tensor_pb2.Tensor(
        dtype=wire, shape=list(tensor.shape), data=flat.view(torch.uint8).numpy().tobytes()
    )


def decode(
    proto: tensor_pb2.Tensor, max_bytes: int, expect_rank: int | None = None, *, require_finite: bool = True
) -> torch.Tensor:
    """Decode into a CPU tensor that owns its memory.

    Args:
        proto: the message, from an untrusted peer.
        max_bytes: cap on the elements' bytes.
        expect_rank: number of dimensions; absent: any from 1 to 4.
        require_finite: refuse NaN and infinities.

    Raises:
        InvalidRequestError: a check failed; names the field.
    """
    dtype = _DTYPES.get(proto.dtype)
    if dtype is None:
        raise InvalidRequestError("dtype", f"unknown tensor dtype {proto.dtype}")
    shape = tuple(proto.shape)
    if not 1 <= len(shape) <= MAX_RANK:
        raise InvalidRequestError("shape", f"{len(shape)} dimensions, 1 to {MAX_RANK} are allowed")
    if expect_rank is not None and len(shape) != expect_rank:
        raise InvalidRequestError("shape", f"{len(shape)} dimensions, {expect_rank} expected")
    if 0 in shape:
        raise InvalidRequestError("shape", f"{shape} has an empty dimension")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > max_bytes:
        raise InvalidRequestError("shape", f"{num_bytes} bytes, at most {max_bytes} are allowed")
    if num_bytes != len(proto.data):
        raise InvalidRequestError("data", f"{len(proto.data)} bytes, the shape {shape} needs {num_bytes}")
    tensor = torch.frombuffer(bytearray(proto.data), dtype=dtype).reshape(shape)
    if require_finite and not bool(torch.isfinite(tensor).all()):
        raise InvalidRequestError("data", "an element is not finite")
    return tensor
