"""Device strings, packed products against plain ones, and thread settings in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.cpu.huge_pages import advise_huge_pages
from paceline.model.linear import HalfWeightLinear, PlainLinear, has_half_weight_linear, has_onednn_linear
from paceline.model.norm import RmsNorm
from paceline.target import Device, SequenceRows, TapSpec, TargetEngine, UnknownDeviceError, configure_threads
from tests.target.conftest import ModelFactory


@pytest.mark.parametrize("text", ["", "gpu", "cpu:1", "cuda:x", "cuda:-1", "cuda:9999", "cpu:0:0"])
def test_unknown_devices_are_refused(text: str) -> None:
    with pytest.raises(UnknownDeviceError):
        Device.parse(text)


def test_cpu_parses() -> None:
    device = Device.parse(" CPU ")
    assert device.torch_device == torch.device("cpu")
    assert device.default_dtype() in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_packed_products_equal_plain_ones(dtype: torch.dtype, with_bias: bool, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight, rows = torch.randn(96, 64, dtype=dtype), torch.randn(num_rows, 64, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if with_bias else None
    residual = torch.randn(num_rows, 96, dtype=dtype)
    before = residual.clone()
    tolerance = {"rtol": 0.02, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    with torch.inference_mode():
        packed, plain = Device.parse("cpu").pack(weight, bias), PlainLinear(weight, bias)
        torch.testing.assert_close(packed(rows), plain(rows), **tolerance)
        torch.testing.assert_close(packed.add(rows, residual), plain(rows) + residual, **tolerance)
        torch.testing.assert_close(plain.add(rows, residual), plain(rows) + residual, **tolerance)
    assert torch.equal(residual, before)
    assert packed.num_bytes == weight.numel() * dtype.itemsize


needs_half_weights = pytest.mark.skipif(
    not has_half_weight_linear(), reason="this build multiplies no float16 weights on CPU"
)


@needs_half_weights
@pytest.mark.parametrize("with_bias", [False, True])
def test_half_weights_round_nothing_but_the_weights(with_bias: bool) -> None:
    torch.manual_seed(2)
    weight, rows, residual = torch.randn(97, 48), torch.randn(9, 48), torch.randn(9, 97)
    bias = torch.randn(97) if with_bias else None
    rounded = PlainLinear(weight.half().float(), bias)
    with torch.inference_mode():
        packed = Device.parse("cpu").pack(weight.half(), bias)
        assert isinstance(packed, HalfWeightLinear)
        torch.testing.assert_close(packed(rows), rounded(rows), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.add(rows, residual), rounded(rows) + residual, rtol=1e-5, atol=1e-5)
        unpacked = Device.parse("cpu").pack(weight.half(), bias, packed=False)
        torch.testing.assert_close(unpacked(rows), rounded(rows))
    assert packed.num_bytes == weight.numel() * 2


@needs_half_weights
@pytest.mark.parametrize("shape", [(960, 576), (3072, 576), (576, 1536)])
def test_half_weight_rows_do_not_depend_on_their_neighbours(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    packed, rows = HalfWeightLinear(torch.randn(shape)), torch.randn(40, shape[1])
    with torch.inference_mode():
        whole = packed(rows)
        for count in (1, 2, 3, 5, 8, 13, 16):
            assert torch.equal(packed(rows[3 : 3 + count]), whole[3 : 3 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_the_paired_norm_is_the_root_mean_square_norm(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(4)
    weight = torch.randn(576, dtype=dtype)
    rows = (torch.randn(5, 576, dtype=torch.float64) * magnitude + magnitude).to(dtype)
    exact = (
        rows.double() * torch.rsqrt(rows.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 0.01}[dtype]
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(rows).double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux alone")
def test_huge_pages_change_no_content() -> None:
    values = torch.arange(4 << 20, dtype=torch.float32)
    assert advise_huge_pages() >= values.nbytes
    assert torch.equal(values, torch.arange(4 << 20, dtype=torch.float32))


def test_dtypes_without_a_packed_product_fall_back() -> None:
    assert not has_onednn_linear(torch.float64)
    assert isinstance(Device.parse("cpu").pack(torch.zeros(4, 4, dtype=torch.float64)), PlainLinear)


def test_threads_and_cores_are_set_for_the_whole_process() -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, torch\n"
        "torch.ones(1000, 1000) @ torch.ones(1000, 1000)\n"
        "from paceline.target import configure_threads\n"
        f"assert configure_threads(None, [{core}]) == 1 == torch.get_num_threads()\n"
        "for thread in os.listdir('/proc/self/task'):\n"
        f"    assert os.sched_getaffinity(int(thread)) == {{{core}}}, thread\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("threads", "cores"), [(0, None), (None, [9999]), (None, [])])
def test_impossible_settings_are_refused(threads: int | None, cores: list[int] | None) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=r"thread|cores"):
        configure_threads(threads, cores)
    assert torch.get_num_threads() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu(tiny_model: ModelFactory) -> None:
    index = torch.cuda.device_count() - 1
    for family in ("llama", "gemma3_text", "qwen2"):
        outputs = []
        for device in ("cpu", f"cuda:{index}"):
            engine = TargetEngine.load(
                tiny_model(family), device=device, dtype=torch.float32, taps=[TapSpec((1,), norm_final=True)]
            )
            slot = engine.open()
            engine.step([SequenceRows(slot, list(range(3, 40)), num_logits="none")])
            out = engine.step([SequenceRows.decode(slot, 5, [6, 7, 8, 9], [-1, 0, -1, 2])])
            engine.keep(slot, [0, 3, 4])
            after = engine.step([SequenceRows.decode(slot, 11)])
            outputs.append((out.logits[0].cpu(), out.features[0].cpu(), after.logits[0].cpu()))
        for cpu, cuda in zip(*outputs, strict=True):
            torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-3)
