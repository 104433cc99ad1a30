"""What is installed is what is here, and only that."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["paceline", "services", "orchestrator", "experiments"])
def test_packages_are_those_of_this_distribution(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name


def test_pins_cover_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.partition("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = [
        *project["dependencies"],
        *(d for group in project["optional-dependencies"].values() for d in group),
    ]
    names = {_name(requirement) for requirement in wanted} - {"paceline"}
    assert names <= pinned, sorted(names - pinned)


def test_default_drafter_is_small() -> None:
    weights = list((ROOT / "paceline" / "assets" / "drafters").rglob("*.safetensors"))
    assert weights
    assert sum(path.stat().st_size for path in weights) <= 20_000_000


def _name(requirement: str) -> str:
    head = requirement.split(";")[0]
    for stop in "[<>=!~ ":
        head = head.split(stop)[0]
    return head.strip().lower().replace("_", "-")
