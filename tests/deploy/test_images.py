"""Dockerfiles: one per process, linted, small in what they carry, run by a number."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

pytestmark = pytest.mark.chart

PORTS = {
    "gateway": "50050 9100",
    "verifier": "50051 9101",
    "drafter": "50052 9102",
    "scheduler": "50053 9103",
    "orchestrator": "50054 9104",
}
EXTRAS = {role: role for role in PORTS} | {"verifier": "verifier,models"}


def hadolint() -> str:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert found is not None, "install the dependency group `chart`"
    return found


def dockerfile(root: Path, role: str) -> Path:
    return root / "deploy" / "images" / f"{role}.Dockerfile"


def instructions(path: Path) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=path.open("rb"))
    return [(i["instruction"], i["value"]) for i in parser.structure if i["instruction"] != "COMMENT"]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction, value in instructions(path):
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, value))
    return found


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def test_there_is_one_dockerfile_per_process(root: Path) -> None:
    scripts = project(root)["project"]["scripts"]
    roles = {name.removeprefix("paceline-") for name in scripts if name.startswith("paceline-")}
    assert roles == {
        path.name.removesuffix(".Dockerfile") for path in (root / "deploy/images").glob("*.Dockerfile")
    }
    assert roles == set(PORTS)


@pytest.mark.parametrize("role", sorted(PORTS))
def test_hadolint_finds_nothing(root: Path, role: str) -> None:
    done = subprocess.run(
        [hadolint(), str(dockerfile(root, role))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN pip install requests\nENTRYPOINT python -m x\n")
    done = subprocess.run([hadolint(), "-f", "json", str(bad)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert {"DL3007", "DL3013", "DL3025"} <= {finding["code"] for finding in json.loads(done.stdout)}


@pytest.mark.parametrize("role", sorted(PORTS))
def test_the_final_stage_runs_one_process_by_number(root: Path, role: str) -> None:
    build, final = stages(dockerfile(root, role))
    last = dict(final)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    assert [i for i, _ in final].index("USER") > [i for i, _ in final].index("RUN")
    script = f"paceline-{role}"
    assert json.loads(last["ENTRYPOINT"]) == [f"/opt/paceline/bin/{script}"]
    assert script in project(root)["project"]["scripts"]
    assert "CMD" not in last
    assert last["EXPOSE"] == PORTS[role]
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert build[0][1].endswith(" AS build")


@pytest.mark.parametrize("role", sorted(PORTS))
def test_the_base_is_one_explicit_version(root: Path, role: str) -> None:
    lines = instructions(dockerfile(root, role))
    (base,) = [
        value for instruction, value in lines if instruction == "ARG" and value.startswith("BASE_IMAGE=")
    ]
    assert re.fullmatch(r"BASE_IMAGE=python:3\.11\.\d+-slim-[a-z]+", base)
    origins = [value.split()[0] for instruction, value in lines if instruction == "FROM"]
    assert origins == ["${BASE_IMAGE}"] * 2


@pytest.mark.parametrize("role", sorted(PORTS))
def test_no_build_tools_reach_the_final_stage(root: Path, role: str) -> None:
    _, final = stages(dockerfile(root, role))
    for instruction, value in final:
        if instruction == "RUN":
            assert not re.search(r"apt-get|pip install|curl|wget|gcc|venv", value)
    runs = " ".join(value for instruction, value in final if instruction == "RUN")
    assert "pip uninstall --yes --quiet pip setuptools wheel" in runs
    copies = [value for instruction, value in final if instruction in ("COPY", "ADD")]
    assert copies == ["--from=build /opt/paceline /opt/paceline"]


@pytest.mark.parametrize("role", sorted(PORTS))
def test_the_environment_is_the_wheel_with_its_extra_and_the_constraints(root: Path, role: str) -> None:
    build, _ = stages(dockerfile(root, role))
    installs = [v for i, v in build if i == "RUN" and "/dist/paceline-*.whl" in v]
    assert len(installs) == 1
    assert f'"${{1}}[{EXTRAS[role]}]"' in installs[0]
    assert "--constraint constraints.txt" in installs[0]
    extras = project(root)["project"]["optional-dependencies"]
    assert set(EXTRAS[role].split(",")) <= set(extras)


def closure(extras: dict[str, list[str]], names: list[str]) -> set[str]:
    """Distributions that extras name, through extras of our own."""
    found: set[str] = set()
    for name in names:
        for requirement in extras[name]:
            own = re.fullmatch(r"paceline\[(.+)\]", requirement)
            if own:
                found |= closure(extras, own[1].split(","))
            else:
                found.add(re.split(r"[ ><=!;\[]", requirement, maxsplit=1)[0])
    return found


@pytest.mark.parametrize("role", ["scheduler", "gateway", "orchestrator"])
def test_images_that_compute_nothing_have_no_torch(root: Path, role: str) -> None:
    extras = project(root)["project"]["optional-dependencies"]
    assert not {"torch", "transformers", "accelerate"} & closure(extras, EXTRAS[role].split(","))
    assert "TORCH_INDEX_URL" not in dockerfile(root, role).read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_images_that_compute_choose_their_torch_by_argument(root: Path, role: str) -> None:
    extras = project(root)["project"]["optional-dependencies"]
    assert "torch" in closure(extras, EXTRAS[role].split(","))
    build, _ = stages(dockerfile(root, role))
    assert ("ARG", "TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu") in build
    assert any("${TORCH_INDEX_URL}" in value for instruction, value in build if instruction == "RUN")


@pytest.mark.parametrize("role", sorted(PORTS))
def test_every_copied_path_is_there_and_in_the_build_context(root: Path, role: str) -> None:
    allowed = {
        line[1:].rstrip("/")
        for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    packages = {
        p.removesuffix(".*") for p in project(root)["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    build, _ = stages(dockerfile(root, role))
    copied = {source for i, value in build if i == "COPY" for source in value.split()[:-1]}
    assert packages <= copied, "a package is missing from the image"
    for source in copied:
        assert (root / source).exists(), source
        assert source in allowed, f"{source} is not in the build context"


def test_the_shipped_drafter_lies_where_images_link_it(root: Path) -> None:
    from paceline.methods.loading import default_drafter

    values = yaml.safe_load((root / "helm/paceline/values.yaml").read_text(encoding="utf-8"))
    shipped = default_drafter(values["model"]["name"])
    assert shipped.parent == root / "paceline" / "assets" / "drafters"
    assert values["draftCheckpoint"] == f"/opt/paceline/share/drafters/{shipped.name}"
    assert list(shipped.glob("*.safetensors")), f"no checkpoint in {shipped}"
    for role in ("verifier", "drafter"):
        assert "paceline/assets/drafters /opt/paceline/share/drafters" in dockerfile(root, role).read_text()
