"""What several areas share: a real Redis on loopback, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os

# One thread that sleeps while it waits, in this process and its children: several computing processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def take_cores(worker: str, num_workers: int) -> None:
    """Pins a worker of pytest-xdist ("gw0", "gw1", ...) and its children to a share of the cores.

    Computing processes that take turns on a core are slow.
    """
    if worker and hasattr(os, "sched_setaffinity"):
        cores, which = sorted(os.sched_getaffinity(0)), int(worker.removeprefix("gw"))
        os.sched_setaffinity(0, cores[which::num_workers] or {cores[which % len(cores)]})


take_cores(os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from paceline.embedded.redis_server import RedisServer
from paceline.native_library import use_libraries_in

if "PACELINE_TEST_KERNELS" in os.environ:  # set by .ci/sanitize
    folder = Path(os.environ["PACELINE_TEST_KERNELS"])
    use_libraries_in(folder)
    for library in folder.iterdir():  # what cannot be loaded would be skipped
        ctypes.CDLL(str(library))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker gets the tests of a file, or those of a folder that is a package, as a whole.

    A file may share a deployment among its tests, a package among its files.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if (config.rootpath / folder / "__init__.py").is_file() else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA device are skipped, visibly, where there is none."""
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def has_gpu() -> bool:
    """Whether NVML sees a device; torch is not imported for it."""
    try:
        pynvml.nvmlInit()
        count: int = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return False
    return count > 0


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole session; tests use their own model fingerprint, so that keys never collide."""
    server = RedisServer.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may kill."""
    server = RedisServer.start(tmp_path / "redis")
    yield server
    server.stop()
