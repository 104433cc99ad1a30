"""CPU speed is a plug-in: with `paceline/cpu` deleted, engine and drafter run in torch and give the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.methods.eagle.feature_layer import parameter_shapes
from tests.methods.native import save_random, save_target

SCRIPT = """
import json, sys
from pathlib import Path
# An editable installation would find the package in the sources all the same.
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
import torch
from paceline.methods.drafter import DraftRequest
from paceline.methods.loading import load_drafter
from paceline.target import SequenceRows, TargetEngine, TapSpec
from paceline.target.executors.backend import has_cpu_kernels, has_cpu_package

target_dir, drafter_dir = map(Path, sys.argv[1:])
found = {"has_package": has_cpu_package(), "has_kernels": has_cpu_kernels()}
for name in ("float32", "bfloat16"):
    dtype = getattr(torch, name)
    engine = TargetEngine.load(target_dir, dtype=dtype, taps=[TapSpec(norm_final=True)])
    engine.cache.commit(1 << 20)
    drafter = load_drafter(drafter_dir, target_dir, dtype=dtype)
    slot, text = engine.open(), [5, 9, 4, 7]
    step = engine.step([SequenceRows(slot, text)])
    drafter.open(1, text)
    drafter.feed(1, 0, step.features[0][:-1])
    (entry,) = drafter.draft([DraftRequest(1, 6, 12)])
    for _ in range(24):
        text.append(int(step.logits[0][-1].argmax()))
        step = engine.step([SequenceRows(slot, text[-1:])])
    found[name] = [text, list(entry.tokens), list(entry.parents)]
    found[name + " on kernels"] = type(engine.executor).__name__ == "NativeExecutor"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and a random EAGLE-1 drafter for it, with widths that the kernels take."""
    target_dir = save_target(tmp_path_factory.mktemp("target"))
    drafter_dir = tmp_path_factory.mktemp("drafter")
    return target_dir, save_random(drafter_dir, target_dir, "eagle1", {"fc_bias": True}, parameter_shapes)


def _run(root: Path, model_dirs: tuple[Path, Path]) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    arguments = [sys.executable, "-c", SCRIPT, *map(str, model_dirs)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_same_tokens_without_the_cpu_package(tmp_path: Path, model_dirs: tuple[Path, Path]) -> None:
    package = Path(paceline.__file__).parent
    (tmp_path / "paceline").mkdir()
    for entry in package.iterdir():
        if entry.name not in ("cpu", "__pycache__"):
            (tmp_path / "paceline" / entry.name).symlink_to(entry)
    whole, without = _run(package.parent, model_dirs), _run(tmp_path, model_dirs)
    assert whole["has_package"] is True
    assert (without["has_package"], without["has_kernels"]) == (False, False)
    assert whole["bfloat16 on kernels"] is whole["has_kernels"]
    assert without["bfloat16 on kernels"] is False
    assert without["float32"] == whole["float32"]
