"""The tensor codec: round trips, and no message that gets past its checks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.errors import InvalidRequestError
from paceline.v1 import tensor_pb2
from services.runtime.tensors import decode, encode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ITEM_BYTES = {1: 4, 2: 2, 3: 2}


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    is_transposed=st.booleans(),
)
@settings(deadline=None)
def test_round_trip_is_bit_exact(
    shape: list[int], dtype: torch.dtype, seed: int, is_transposed: bool
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if is_transposed:
        tensor = tensor.transpose(0, -1)
    again = decode(encode(tensor), max_bytes=1 << 20, expect_rank=len(shape))
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


def test_decoded_tensor_owns_writable_memory() -> None:
    proto = encode(torch.ones(3))
    tensor = decode(proto, 12)
    tensor[0] = 5.0
    assert torch.equal(decode(proto, 12), torch.ones(3))


@given(
    dtype=st.integers(0, 5),
    shape=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 4), max_size=6),
    data=st.binary(max_size=64),
    max_bytes=st.integers(0, 64),
    rank=st.none() | st.integers(0, 5),
)
@settings(deadline=None, max_examples=300)
def test_any_message_is_refused_or_fits(
    dtype: int, shape: list[int], data: bytes, max_bytes: int, rank: int | None
) -> None:
    proto = tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)
    num_bytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    is_good = (
        dtype in ITEM_BYTES
        and 1 <= len(shape) <= 4
        and rank in (None, len(shape))
        and 0 < num_bytes <= max_bytes
        and num_bytes == len(data)
    )
    try:
        tensor = decode(proto, max_bytes, rank, require_finite=False)
    except InvalidRequestError:
        assert not is_good
    else:
        assert is_good
        assert list(tensor.shape) == shape


@given(position=st.integers(0, 5), value=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(deadline=None)
def test_values_that_are_not_finite_are_refused(position: int, value: float) -> None:
    tensor = torch.zeros(2, 3)
    tensor.view(-1)[position] = value
    with pytest.raises(InvalidRequestError, match="finite"):
        decode(encode(tensor), 64)
    assert decode(encode(tensor), 64, require_finite=False).shape == (2, 3)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.int64), torch.zeros(0), torch.zeros(1, 1, 1, 1, 1)]
)
def test_what_the_wire_does_not_carry_is_not_encoded(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidRequestError):
        encode(tensor)
