"""Values: what the schema refuses, and that it describes every default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

import paceline

pytestmark = pytest.mark.chart


def test_the_chart_passes_strict_lint_with_every_flavour(root: Path, flavour: dict[str, Any]) -> None:
    report = helm.lint(root / "helm" / "paceline", flavour, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] >= 2] == []


def test_lint_notices_a_broken_template(root: Path, tmp_path: Path) -> None:
    copy = helm.Chart.load(root / "helm" / "paceline").save_dir(tmp_path)
    (Path(copy) / "templates" / "broken.yaml").write_text("a: {{ .Values.absent.deeper }}\n")
    assert helm.lint(copy, strict=True)["errors"]


def test_the_chart_has_the_version_of_the_package(chart: Any) -> None:
    assert chart.metadata["appVersion"] == paceline.__version__
    assert chart.metadata["version"] == paceline.__version__


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"replicas": 1}, "replicas"),
        ({"verifier": {"replica": 2}}, "/verifier"),
        ({"verifier": {"replicas": 0}}, "/verifier/replicas"),
        ({"verifier": {"device": "gpu"}}, "/verifier/device"),
        ({"verifier": {"gpu": {"resource": "gpus", "count": 1}}}, "/verifier/gpu/resource"),
        ({"verifier": {"resources": {"limits": {"memory": "much"}}}}, "/verifier/resources/limits/memory"),
        ({"drafter": {"settings": {"Log-Level": "debug"}}}, "Log-Level"),
        ({"drafter": {"settings": {"log_level": ["debug"]}}}, "/drafter/settings/log_level"),
        ({"drafter": {"pdb": {"enabled": True, "maxUnavailable": -1}}}, "/drafter/pdb/maxUnavailable"),
        ({"scheduler": {"replicas": 2}}, "/scheduler"),
        ({"orchestrator": {"replicas": 2}}, "/orchestrator"),
        ({"placement": "nearby"}, "/placement"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"model": {"name": "../etc"}}, "/model/name"),
        ({"model": {"source": "pvc"}}, "/model"),
        (
            {"model": {"source": "pvc", "pvc": {"existingClaim": "weights", "path": "../x"}}},
            "/model/pvc/path",
        ),
        ({"draftCheckpoint": ""}, "/draftCheckpoint"),
        ({"lifecycle": {"drainSeconds": "60"}}, "/lifecycle/drainSeconds"),
        ({"orchestrator": {"ray": {"mode": "kuberay"}}}, "/orchestrator/ray"),
        ({"orchestrator": {"ray": {"mode": "somewhere"}}}, "/orchestrator/ray/mode"),
        ({"redis": {"enabled": False}}, "/redis"),
        ({"redis": {"enabled": False, "externalUrl": "http://x"}}, "/redis/externalUrl"),
        ({"redis": {"image": "valkey/valkey:latest"}}, "/redis/image"),
        ({"gateway": {"service": {"type": "ExternalName"}}}, "/gateway/service/type"),
    ],
)
def test_the_schema_refuses_and_says_where(chart: Any, values: dict[str, Any], where: str) -> None:
    with pytest.raises(helm.HelmValuesError) as caught:
        chart.validate_schema(chart.merge_values(values))
    assert where in str(caught.value)


def test_the_schema_knows_every_default_and_nothing_else(root: Path) -> None:
    schema = json.loads((root / "helm/paceline/values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((root / "helm/paceline/values.yaml").read_text(encoding="utf-8"))

    def compare(node: dict[str, Any], defaults: Any, path: str) -> None:
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        if path != "/resources":
            optional = {"global"} if path == "" else {"requests", "limits"}
            assert set(node["properties"]) - set(defaults) <= optional, path
        for key, value in defaults.items():
            compare(node["properties"][key], value, f"{path}/{key}")

    compare(schema, values, "")


def test_the_readme_lists_every_value(root: Path) -> None:
    readme = (root / "helm/paceline/README.md").read_text(encoding="utf-8")
    values = yaml.safe_load((root / "helm/paceline/values.yaml").read_text(encoding="utf-8"))
    for key, value in values.items():
        names = [f"`{key}`"] if not isinstance(value, dict) else [f"`{key}.{inner}`" for inner in value]
        shared = {"verifier", "drafter", "scheduler", "gateway", "orchestrator"}
        for name in names:
            generic = name.replace(f"{key}.", "ROLE.") if key in shared else name
            assert name in readme or generic in readme, f"{name} is not in the chart's README"
