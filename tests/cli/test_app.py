"""The command line as a user meets it: help without torch, plug-ins, errors with a field and an exit code."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline
from paceline.cli import main

ROOT = Path(paceline.__file__).parent.parent
HEAVY = ("torch", "transformers", "ray", "grpc", "numpy", "structlog")


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    import os

    return subprocess.run(
        [sys.executable, "-c", "from paceline.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )


def exit_code(*arguments: str) -> int:
    """The command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n    main(['--help'])\n"
        f"finally:\n    print('loaded', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "loaded []" in done.stdout
    for command in (
        "up",
        "checkpoints",
        "generate",
        "doctor",
        "methods",
        "models",
        "modes",
        "train",
        "data",
        "version",
    ):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "command", ["up", "checkpoints", "generate", "doctor", "version", "methods", "models", "modes", "data"]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    assert "Usage: paceline" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("version") == 0
    assert paceline.__version__ in capsys.readouterr().out


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("fly") == 2
    assert "fly" in capsys.readouterr().err


def test_a_plug_in_is_listed_without_being_imported_and_runs(tmp_path: Path) -> None:
    (tmp_path / "brakes.py").write_text(
        '"""Slow the bunch down.\n\nMore."""\nimport sys\nsys.stderr.write("imported")\n\n'
        'def brakes(hard: bool = False) -> None:\n    """Brake."""\n    print("braking", hard)\n'
    )
    metadata = tmp_path / "brakes-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: brakes\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[paceline.commands]\nbrakes = brakes:brakes\n")
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    listed = run("--help", env=env)
    assert "brakes Slow the bunch down." in " ".join(listed.stdout.split())
    assert "imported" not in listed.stderr
    assert run("brakes", "--hard", env=env).stdout == "braking True\n"


def test_commands_of_other_packages_are_where_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = project["entry-points"]["paceline.commands"]
    assert {"bench", "evaluate", "curves"} <= set(commands)
    for place in commands.values():
        module, _, attribute = place.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_doctor_tells_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    done = run("doctor", "--json", env={"PACELINE_CACHE": str(tmp_path)})
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["default model"]["state"] == "missing"
    assert checks["default model"]["fix"] == "paceline models fetch smollm2-135m"
    assert checks["redis server"]["state"] == "ok"
    assert {
        "python",
        "torch",
        "ray",
        "cores",
        "instructions",
        "CPU kernels",
        "sampling kernels",
        "model cache",
        "ports",
    } <= set(checks)
    assert "gpu" in checks or any(name.startswith("cuda:") for name in checks)
    for_people = run("doctor", env={"PACELINE_CACHE": str(tmp_path)}).stdout
    assert "-> paceline models fetch smollm2-135m" in for_people


def test_an_absent_model_says_how_to_fetch_it(tmp_path: Path) -> None:
    done = run("models", "path", "smollm2-135m", env={"PACELINE_CACHE": str(tmp_path)})
    assert done.returncode == 1
    assert "paceline models fetch smollm2-135m" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("models", "list") == 0
    listed = capsys.readouterr().out
    assert "smollm2-135m" in listed
    assert "Apache-2.0" in listed


def test_modes_are_listed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("modes", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["greedy", "coupled", "rejection", "block", "typical"]
    assert [row["exact"] for row in rows] == [True, True, True, True, False]
    assert ["distribution" in row["needs"] for row in rows] == [False, False, True, True, False]
    assert exit_code("modes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isalpha()][:1] == ["name"]
    assert any(line.startswith("typical") and " no " in line for line in lines)


def test_methods_are_listed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.methods.registry import METHODS

    assert exit_code("methods", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(METHODS) >= {"eagle3", "independent"}
    for name, row in rows.items():
        assert set(row) == {"name", "trainable", "placements", "formats", "tap"}
        assert row["trainable"] == (METHODS[name].recipe is not None)
        assert row["placements"] == ["colocated", "separate"]
        assert "paceline" in row["formats"]
    assert rows["eagle3"]["tap"] == "three layers, fused"
    assert rows["independent"]["tap"] == "nothing"
    assert exit_code("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isalpha()] == ["name", *METHODS, "each"]
    assert lines[-1] == "each may be placed colocated or separate"


def test_the_table_of_methods_needs_no_model(tmp_path: Path) -> None:
    done = run("methods", "--json", env={"PACELINE_CACHE": str(tmp_path), "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) >= 2
