"""The compose file: the chart's processes, ports, limits and health checks on one machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.chart

ROLES = ("gateway", "verifier", "drafter", "scheduler", "orchestrator")
UNITS = {"K": 2**10, "Ki": 2**10, "M": 2**20, "Mi": 2**20, "G": 2**30, "Gi": 2**30}


def num_bytes(size: str) -> int:
    """Compose counts K, M, G in powers of 1024, as Kubernetes does Ki, Mi, Gi."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i?)", size).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def chart_bytes(size: str) -> int:
    assert size.endswith("i"), size
    return num_bytes(size)


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, dict[str, Any]]:
    """Both files, merged as compose merges them where that matters here."""
    merged: dict[str, dict[str, Any]] = {}
    for name in ("compose.yaml", "compose.separate.yaml"):
        document = yaml.safe_load((root / "deploy" / name).read_text(encoding="utf-8"))
        for service, body in document["services"].items():
            before = merged.setdefault(service, {})
            depends = {**before.get("depends_on", {}), **body.get("depends_on", {})}
            before.update(body)
            if depends:
                before["depends_on"] = depends
    return merged


def test_names_are_the_charts(services: dict[str, Any], render: Any) -> None:
    manifests = render(placement="separate")
    workloads = {
        item["metadata"]["name"].removeprefix("demo-paceline-")
        for kind in ("Deployment", "StatefulSet")
        for item in manifests.of_kind(kind)
    }
    assert set(services) == workloads | {"fetch-model"}


@pytest.mark.parametrize("role", [*ROLES, "redis"])
def test_ports_limits_and_images_are_the_charts(services: dict[str, Any], render: Any, role: str) -> None:
    manifests = render(placement="separate")
    container, service = manifests.main_container(role), services[role]
    published = [str(port).rpartition(":")[2] for port in service.get("ports", [])]
    reached = {int(port) for port in [*service.get("expose", []), *published]}
    assert reached == {port["containerPort"] for port in container["ports"]}
    limit = service["deploy"]["resources"]["limits"]["memory"]
    assert num_bytes(limit) == chart_bytes(container["resources"]["limits"]["memory"])
    image = re.sub(r"\$\{PACELINE_TAG:-(.+)\}", r"\1", service["image"])
    assert image == container["image"]


@pytest.mark.parametrize("role", ROLES)
def test_flags_are_the_charts_but_for_addresses(services: dict[str, Any], render: Any, role: str) -> None:
    chart_flags = dict(arg.split("=", 1) for arg in render(placement="separate").main_container(role)["args"])
    flags = dict(arg.split("=", 1) for arg in services[role]["command"])
    users = {
        "--redis-username",
        "--redis-password-file",
    }  # compose's Redis is reached from the scheduler alone
    assert set(flags) == set(chart_flags) - users
    addresses = {"--verifiers", "--drafters", "--scheduler", "--orchestrator", "--redis-url"}
    assert {k: v for k, v in flags.items() if k not in addresses} == {
        k: v for k, v in chart_flags.items() if k not in addresses | users
    }
    for flag in addresses & set(flags):
        for address in flags[flag].split(","):
            host, _, port = address.removeprefix("redis://").removesuffix("/0").rpartition(":")
            assert port in services[host]["expose"], address


def test_the_first_file_alone_is_colocated(root: Path, render: Any) -> None:
    alone = yaml.safe_load((root / "deploy/compose.yaml").read_text(encoding="utf-8"))["services"]
    assert "drafter" not in alone
    for role in ("verifier", "orchestrator"):
        chart = [a for a in render().main_container(role)["args"] if "demo-paceline" not in a]
        assert [a for a in alone[role]["command"] if not re.match(r"--(verifiers|scheduler)=", a)] == chart


@pytest.mark.parametrize("role", ROLES)
def test_health_checks_and_grace_are_the_charts(services: dict[str, Any], render: Any, role: str) -> None:
    manifests = render(placement="separate")
    container, service = manifests.main_container(role), services[role]
    check, probe, startup = service["healthcheck"], container["readinessProbe"], container["startupProbe"]
    assert check["test"][0] == "CMD"
    assert check["test"][-1] == str(probe["grpc"]["port"])
    assert check["test"][2] == "/opt/paceline/share/health.py"
    assert check["interval"] == f"{probe['periodSeconds']}s"
    assert check["timeout"] == f"{probe['timeoutSeconds']}s"
    assert check["retries"] == probe["failureThreshold"]
    assert check["start_period"] == f"{startup['periodSeconds'] * startup['failureThreshold']}s"
    graces = {
        template["spec"]["terminationGracePeriodSeconds"]
        for owner, template in manifests.pod_templates()
        if owner.endswith(f"-{role}")
    }
    assert graces == {int(service["stop_grace_period"].rstrip("s"))}


@pytest.mark.parametrize("role", [*ROLES, "redis", "fetch-model"])
def test_containers_are_restricted(services: dict[str, Any], role: str) -> None:
    service = services[role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp:exec,mode=1777"]
    assert "privileged" not in service
    assert ":latest" not in service["image"]


def test_images_are_built_from_the_dockerfiles_and_run_their_entry_points(
    services: dict[str, Any], root: Path
) -> None:
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for role in ROLES:
        service = services[role]
        assert service["image"].startswith(f"paceline/{role}:")
        path = (root / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
        assert path.is_file()
        assert f"paceline-{role}" in scripts
        assert "entrypoint" not in service, "the image's own entry point runs"


def test_only_the_gateway_is_published_and_redis_is_the_schedulers(
    services: dict[str, Any], root: Path
) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert services["gateway"]["ports"] == ["127.0.0.1:50050:50050"]
    assert sorted(n for n, s in services.items() if "state" in s["networks"]) == ["redis", "scheduler"]
    assert services["redis"]["networks"] == ["state"]
    networks = yaml.safe_load((root / "deploy/compose.yaml").read_text(encoding="utf-8"))["networks"]
    assert {name for name, body in networks.items() if body and body.get("internal")} == {"peers", "state"}


def test_whatever_is_waited_for_and_mounted_exists(services: dict[str, Any], root: Path) -> None:
    document = yaml.safe_load((root / "deploy/compose.yaml").read_text(encoding="utf-8"))
    for name, service in services.items():
        assert set(service["networks"]) <= set(document["networks"]), name
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in document["volumes"], name
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other]
