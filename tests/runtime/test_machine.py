"""Devices and cores of the machine the tests run on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.contract.errors import InvalidRequestError
from services.runtime.cores import parse_cores
from services.runtime.devices import describe_device


def test_cpu_is_described() -> None:
    info = describe_device("cpu")
    assert info.device == "cpu"
    assert info.name
    assert info.memory_total_bytes > info.memory_used_bytes > 0
    assert 0 <= info.utilization <= 1
    assert info.note == ""


def test_missing_gpu_is_a_note_and_not_an_error() -> None:
    for device in ("cuda:4096", "cuda:x", "cuda:-1"):
        info = describe_device(device, {})
        assert info.device == device
        assert info.note.startswith("no GPU")
        assert info.utilization < 0


def test_hidden_gpu_is_a_note() -> None:
    assert describe_device("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}).note.startswith("no GPU")


@pytest.mark.gpu
def test_gpu_is_described() -> None:
    info = describe_device("cuda:0")
    assert info.name
    assert info.memory_total_bytes > 0


def test_unknown_device_is_a_note() -> None:
    assert "tpu" in describe_device("tpu").note


@pytest.mark.parametrize(
    ("text", "cores"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("3,0-1, 1", (0, 1, 3)), ("7-7", (7,))]
)
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0,,1", "0-99999999", "²"])
def test_bad_core_lists(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_cores(text)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_pinning_holds_for_the_computing_thread_and_what_it_starts() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"""
import os, threading
from services.runtime.cores import plan_pinning
pinning = plan_pinning("{core}", 1)
allowed = os.sched_getaffinity(0)
masks = []
def compute():
    pinning.pin_thread()
    masks.append(os.sched_getaffinity(0))
    child = threading.Thread(target=lambda: masks.append(os.sched_getaffinity(0)))
    child.start(); child.join()
thread = threading.Thread(target=compute)
thread.start(); thread.join()
print(pinning.cores, masks == [{{{core}}}] * 2, os.sched_getaffinity(0) == allowed, os.environ["OMP_NUM_THREADS"])
"""
    assert run_python(code) == f"({core},) True True 1"


def test_no_cores_asked_for_pins_nothing() -> None:
    code = """
import os
from services.runtime.cores import plan_pinning
allowed = os.sched_getaffinity(0)
pinning = plan_pinning()
pinning.pin_thread()
print(os.sched_getaffinity(0) == allowed == set(pinning.cores), pinning.num_threads == len(allowed))
"""
    assert run_python(code) == "True True"


def test_cores_that_are_not_ours_are_refused() -> None:
    code = """
from paceline.contract.errors import InvalidRequestError
from services.runtime.cores import plan_pinning
for arguments in (("9999", None), (None, 0)):
    try:
        plan_pinning(*arguments)
    except InvalidRequestError as error:
        print(error.field)
"""
    assert run_python(code) == "cores\nthreads"


@pytest.mark.parametrize(
    "module",
    [
        "services.runtime.lifecycle",
        "services.scheduler.__main__",
        "services.gateway.__main__",
        "orchestrator.__main__",
        "orchestrator.conductor",
    ],
)
def test_processes_without_tensors_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    assert run_python(code) == "[]"
