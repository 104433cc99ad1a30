"""Flags and variables of chart and compose file, against the settings that the processes really read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runtime.settings import ServerSettings, load

pytestmark = pytest.mark.chart

MODULES = {
    "verifier": "services.verifier.settings",
    "drafter": "services.drafter.settings",
    "scheduler": "services.scheduler.settings",
    "gateway": "services.gateway.settings",
    "orchestrator": "orchestrator.settings",
}
RAY = {"mode": "kuberay", "kuberay": {"authTokenSecret": {"name": "ray-token"}}}
VALUES: list[dict[str, Any]] = [
    {"placement": "colocated"},
    {
        "placement": "separate",
        "verifier": {"threads": 2, "replicas": 2},
        "drafter": {"threads": 1, "replicas": 2},
    },
    {"placement": "separate", "orchestrator": {"ray": RAY}},
]


def settings_class(role: str) -> type[ServerSettings]:
    module = importlib.import_module(MODULES[role])
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ServerSettings)
        and value is not ServerSettings
        and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} defines {found}"
    return found[0]


def settle(
    monkeypatch: pytest.MonkeyPatch, role: str, args: list[str], environ: dict[str, str]
) -> ServerSettings:
    """What the process would make of them; an unknown flag or variable ends with SystemExit."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return load(settings_class(role), args, environ)


@pytest.mark.parametrize("role", sorted(MODULES))
@pytest.mark.parametrize("values", VALUES, ids=["colocated", "separate", "kuberay"])
def test_the_process_takes_what_the_chart_gives(
    render: Any, monkeypatch: pytest.MonkeyPatch, role: str, values: dict[str, Any]
) -> None:
    if role == "drafter" and values["placement"] == "colocated":
        return
    values = {
        **values,
        role: {**values.get(role, {}), "settings": {"log_level": "warning", "reflection": False}},
    }
    manifests = render(**values)
    container = manifests.main_container(role)
    environ = dict(manifests.get("ConfigMap", f"-{role}")["data"])
    for variable in container.get("env", []):
        if variable["name"].startswith("PACELINE_"):
            example = "redis://u:p@h:6379/0" if variable["name"].endswith("_URL") else "10.0.0.7"
            environ[variable["name"]] = variable.get("value", example)
    settings = settle(monkeypatch, role, container["args"], environ)
    assert settings.log_level == "warning"
    assert settings.reflection is False
    assert settings.host == "0.0.0.0"
    assert settings.drain_s == 60
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert (settings.port, settings.metrics_port) == (ports["grpc"], ports["metrics"])


@pytest.mark.parametrize("role", sorted(MODULES))
def test_the_ports_are_the_defaults_of_the_process(render: Any, role: str) -> None:
    ports = {
        p["name"]: p["containerPort"] for p in render(placement="separate").main_container(role)["ports"]
    }
    fields = settings_class(role).model_fields
    assert (fields["port"].default, fields["metrics_port"].default) == (ports["grpc"], ports["metrics"])


@pytest.mark.parametrize("role", sorted(MODULES))
@pytest.mark.parametrize(
    "files", [["compose.yaml"], ["compose.yaml", "compose.separate.yaml"]], ids=["one", "both"]
)
def test_the_process_takes_what_compose_gives(
    root: Path, monkeypatch: pytest.MonkeyPatch, role: str, files: list[str]
) -> None:
    service: dict[str, Any] = {}
    for name in files:
        service |= yaml.safe_load((root / "deploy" / name).read_text(encoding="utf-8"))["services"].get(
            role, {}
        )
    if not service:
        assert (role, len(files)) == ("drafter", 1)
        return
    environ = {k: str(v) for k, v in service.get("environment", {}).items() if k.startswith("PACELINE_")}
    settings = settle(monkeypatch, role, service["command"], environ)
    assert settings.host == "0.0.0.0"


def test_a_misspelt_flag_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settle(monkeypatch, "gateway", ["--model=/models/x", "--orchestratr=h:1"], {})
    assert "orchestratr" in capsys.readouterr().err
