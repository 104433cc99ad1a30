"""What the docs name exists: files and definitions in docs/structure.md, commands and their options on every page."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from experiments.pipeline.measure import Lengths, parse_cycles
from paceline.cli.app import app

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("paceline", "services", "orchestrator", "experiments")
    for path in (ROOT / folder).rglob("*.py")
    if "v1" not in path.parts
]
NAMED = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "structure.md").read_text())


def test_named_files_exist() -> None:
    files = [name for name in NAMED if re.fullmatch(r"[\w/]+\.py", name)]
    paths = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    assert len(files) > 40
    missing = [name for name in files if not any(path == name or path.endswith(f"/{name}") for path in paths)]
    assert missing == []


def test_named_folders_exist() -> None:
    folders = [name for name in NAMED if re.fullmatch(r"[\w/]+/", name)]
    assert len(folders) > 8
    assert [name for name in folders if not (ROOT / name).is_dir()] == []


def test_named_definitions_exist() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    defined = set(re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    names = [name for name in NAMED if re.fullmatch(r"[A-Z]\w+\.\w+|_?[a-z]+_[a-z_]+", name)]
    assert len(names) > 30
    wire = {"GenerationService", "DirectorService", "ConductorService", "SchedulerService"}
    missing = [
        name for name in names if name.split(".")[0] not in wire and not set(name.split(".")) <= defined
    ]
    assert missing == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [
    pytest.param(line.strip(), id=f"{page.name}: {line.strip()[:60]}")
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("paceline ")
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", COMMANDS)
def test_named_commands_take_these_options(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    context = command.make_context("paceline", arguments)
    while (rest := [*context._protected_args, *context.args]) and hasattr(command, "resolve_command"):
        name, command, arguments = command.resolve_command(context, rest)
        assert command is not None, name
        context = command.make_context(name, arguments, parent=context)


EXPERIMENTS = [
    pytest.param(line.strip(), id=f"{page.name}: {line.strip()[:70]}")
    for page in PAGES
    for block in re.findall(r"```(?:console)?\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("python -m experiments.")
]


def test_there_are_experiments() -> None:
    assert len(EXPERIMENTS) > 4


@pytest.mark.parametrize("line", EXPERIMENTS)
def test_named_experiments_take_these_options(line: str) -> None:
    _, _, module, *arguments = shlex.split(line, comments=True)
    name = module.rpartition(".")[2]
    command = typer.Typer(add_completion=False)
    command.command()(getattr(importlib.import_module(f"{module}.__main__"), name))
    context = get_command(command).make_context(name, arguments)
    if name == "pipeline":  # what it makes of its words only shows when it runs
        assert parse_cycles(context.params["cycles"], Lengths())
