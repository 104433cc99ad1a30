"""The chart, rendered in process, and where the deployment files lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="install the dependency group `chart`")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "paceline"
RELEASE = "demo"
KUBERAY = {
    "ray": {
        "mode": "kuberay",
        "kuberay": {"workers": {"replicas": 2}, "authTokenSecret": {"name": "ray-token"}},
    }
}


@dataclass(frozen=True)
class Manifests:
    """Rendered objects, found by kind and the end of their name."""

    objects: tuple[dict[str, Any], ...]
    notes: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.objects if item["kind"] == kind]

    def find(self, kind: str, suffix: str) -> dict[str, Any] | None:
        """The object called ``<fullname><suffix>``, where it is."""
        wanted = f"{RELEASE}-paceline{suffix}"
        found = [item for item in self.of_kind(kind) if item["metadata"]["name"] == wanted]
        assert len(found) <= 1, f"{kind} {wanted} twice"
        return found[0] if found else None

    def get(self, kind: str, suffix: str) -> dict[str, Any]:
        found = self.find(kind, suffix)
        assert found is not None, f"no {kind} {suffix}: {[i['metadata']['name'] for i in self.of_kind(kind)]}"
        return found

    def pod_templates(self) -> list[tuple[str, dict[str, Any]]]:
        """(owner, template) of every pod that the release makes, the test pod included."""
        found: list[tuple[str, dict[str, Any]]] = []
        for item in self.objects:
            name, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
            if item["kind"] in ("Deployment", "StatefulSet"):
                found.append((name, spec["template"]))
            elif item["kind"] == "Pod":
                found.append((name, item))
            elif item["kind"] == "RayCluster":
                groups = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]
                found.extend((f"{name}/{i}", group["template"]) for i, group in enumerate(groups))
        return found

    def main_container(self, role: str) -> dict[str, Any]:
        """The container called like the role."""
        for _, template in self.pod_templates():
            for container in template["spec"]["containers"]:
                if container["name"] == role:
                    return dict(container)
        raise AssertionError(f"no container {role}")


Render = Callable[..., Manifests]


@pytest.fixture(scope="session")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: Any) -> Render:
    """Values to checked manifests: ``render(placement="separate")``."""

    def run(**values: Any) -> Manifests:
        chart.validate_schema(values)
        files = chart.render(values, name=RELEASE, namespace="models")
        objects: list[dict[str, Any]] = []
        notes = ""
        for path, text in sorted(files.items()):
            if path.endswith("NOTES.txt"):
                notes = text
            else:
                objects.extend(item for item in yaml.safe_load_all(text) if item)
        return Manifests(tuple(objects), notes)

    return run


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(
    scope="session",
    params=[
        "default",
        "separate",
        "pool",
        "kuberay",
        "external-url",
        "example-colocated-cpu",
        "example-separate-gpu",
        "example-external-redis",
    ],
)
def flavour(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Values that between them turn every switch of the chart."""
    if request.param.startswith("example-"):
        path = ROOT / "helm" / "examples" / f"values-{request.param.removeprefix('example-')}.yaml"
        values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return values
    return {
        "default": {},
        "separate": {"placement": "separate"},
        "pool": {
            "placement": "separate",
            "verifier": {"replicas": 2, "threads": 4},
            "drafter": {"replicas": 3, "settings": {"log_level": "debug", "reflection": False}},
            "model": {"source": "pvc", "pvc": {"existingClaim": "weights"}},
            "redis": {"persistence": {"enabled": False}},
            "networkPolicy": {"gatewayFrom": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]},
        },
        "kuberay": {"placement": "separate", "orchestrator": KUBERAY},
        "external-url": {
            "redis": {"enabled": False, "externalUrl": "redis://elsewhere:6379/0"},
            "metrics": {"serviceMonitor": {"enabled": True}},
            "networkPolicy": {"enabled": False},
        },
    }[request.param]
