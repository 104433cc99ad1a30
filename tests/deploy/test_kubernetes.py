"""Every manifest against the schemas of two Kubernetes versions: unknown fields are errors."""

from __future__ import annotations

import copy
import json
from typing import Any

import kubernetes_validate
import pytest

pytestmark = pytest.mark.chart

CUSTOM_KINDS = {"RayCluster", "ServiceMonitor"}


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """What has been validated already: flavours share most of their objects, and validation is slow."""
    return set()


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_manifests_are_valid(render: Any, flavour: dict[str, Any], version: str, checked: set[str]) -> None:
    manifests = render(**flavour)
    assert len(manifests.objects) > 15
    for item in manifests.objects:
        key = version + json.dumps(item, sort_keys=True)
        if item["kind"] not in CUSTOM_KINDS and key not in checked:
            checked.add(key)
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_pods_of_the_ray_cluster_are_valid(render: Any, version: str) -> None:
    ray = {
        "mode": "kuberay",
        "kuberay": {"workers": {"replicas": 1}, "authTokenSecret": {"name": "ray-token"}},
    }
    manifests = render(orchestrator={"ray": ray})
    templates = [(owner, t) for owner, t in manifests.pod_templates() if owner.startswith("RayCluster/")]
    assert len(templates) == 2
    for _, template in templates:
        metadata = {"name": "checked", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_check_notices_a_misspelt_field(render: Any) -> None:
    item = copy.deepcopy(render().get("Deployment", "-gateway"))
    item["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, "1.30", strict=True)
