"""Medusa's heads on the CPU kernels: near to float32, not rounded into ties, and the same alone and in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.cpu import kernels
from paceline.cpu.linear import KernelLinear
from paceline.methods import backend
from paceline.methods.medusa_heads.heads import MedusaHeads, MedusaShape, OutputHead
from paceline.target import Device
from tests.methods.conftest import MEDUSA, medusa_tensors

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="the CPU kernels do not run here")

CPU = Device.parse("cpu")
SHAPES = [
    MEDUSA,
    replace(MEDUSA, num_layers=2, num_heads=3, has_bias=False),
    replace(MEDUSA, output=OutputHead.SHARED),
]


def _heads(shape: MedusaShape, dtype: torch.dtype) -> MedusaHeads:
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in medusa_tensors(shape).items()
    }
    return MedusaHeads(shape, tensors, None, CPU, dtype)


def _rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_near_those_of_float32(shape: MedusaShape) -> None:
    native, exact = _heads(shape, torch.bfloat16), _heads(shape, torch.float32)
    heads = range(shape.num_heads)
    with torch.inference_mode():
        found, expected = native.forward(_rows(7), heads), exact.forward(_rows(7).float(), heads)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
    assert not torch.equal(found, found.bfloat16().float())  # ranks that differ by less do not tie


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_alone_and_in_any_group(shape: MedusaShape) -> None:
    native, rows = _heads(shape, torch.bfloat16), _rows(17)
    assert isinstance(native._outputs[0], KernelLinear)
    heads = range(shape.num_heads)
    with torch.inference_mode():
        alone = torch.cat([native.forward(rows[i : i + 1], heads) for i in range(17)])
        for count in (2, 5, 8, 17):
            assert torch.equal(native.forward(rows[:count], heads), alone[:count])
        assert torch.equal(native.forward(rows[3:9], range(1, 2)), alone[3:9, 1:2])


def test_torch_stands_in_where_the_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    native = _heads(MEDUSA, torch.bfloat16)
    monkeypatch.setattr(backend, "has_cpu_package", lambda: False)
    plain = _heads(MEDUSA, torch.bfloat16)
    assert not isinstance(plain._outputs[0], KernelLinear)
    with torch.inference_mode():
        found, expected = (one.forward(_rows(4), range(5)) for one in (native, plain))
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
