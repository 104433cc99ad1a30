"""Commands that chart and compose file run from `paceline` itself: the helm test and the model fetch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.chart


def help_of(*command: str) -> str:
    """What ``paceline COMMAND --help`` prints."""
    program = "import sys; from paceline.cli import main; sys.argv[0] = 'paceline'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_helm_test_uses_options_that_generate_has(render: Any) -> None:
    (pod,) = render().of_kind("Pod")
    command, *rest = pod["spec"]["containers"][0]["args"]
    options = [argument.partition("=")[0] for argument in rest if argument.startswith("--")]
    assert options
    text = help_of(command)
    for option in options:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"`paceline {command}` has no {option}"


def test_models_are_fetched_by_a_command_that_exists(render: Any, root: Path) -> None:
    compose = yaml.safe_load((root / "deploy/compose.yaml").read_text(encoding="utf-8"))
    (init,) = render().get("StatefulSet", "-verifier")["spec"]["template"]["spec"]["initContainers"]
    for arguments in (init["args"], compose["services"]["fetch-model"]["command"]):
        assert len(arguments) == 3
        assert "Usage" in help_of(*arguments[:2])


def test_a_fetched_model_lands_where_the_verifier_looks(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.models.cache import CACHE_VARIABLE, model_path

    spec = render().get("StatefulSet", "-verifier")["spec"]["template"]["spec"]
    (init,), (verifier,) = spec["initContainers"], spec["containers"]
    variables = {variable["name"]: variable["value"] for variable in init["env"]}
    monkeypatch.setenv(CACHE_VARIABLE, variables[CACHE_VARIABLE])
    assert f"--model={model_path(init['args'][2])}" in verifier["args"]
    mounts = {m["mountPath"] for m in init["volumeMounts"]}
    assert str(model_path("x").parent) in mounts
