"""Who may call whom: the policies, evaluated as a cluster would."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.chart

KUBERAY = {
    "ray": {
        "mode": "kuberay",
        "kuberay": {"workers": {"replicas": 1}, "authTokenSecret": {"name": "ray-token"}},
    }
}


def labels(role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": role,
    }


def selects(selector: dict[str, Any], pod: dict[str, str]) -> bool:
    if not selector.get("matchLabels", {}).items() <= pod.items():
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if pod.get(rule["key"]) not in rule["values"]:
            return False
    return True


def port_fits(rule: dict[str, Any], port: int) -> bool:
    if "ports" not in rule:
        return True
    return any(
        p["port"] <= port <= p.get("endPort", p["port"]) and p["protocol"] == "TCP" for p in rule["ports"]
    )


def allows(manifests: Any, source: str, target: str, port: int) -> bool:
    """Whether a pod of `source` may open a connection to `port` of `target`, by both of their policies."""

    def peer_fits(peers: list[dict[str, Any]] | None, role: str) -> bool:
        if not peers:
            return True
        return any(
            selects(p["podSelector"], labels(role)) if "podSelector" in p else p["namespaceSelector"] == {}
            for p in peers
        )

    policies = manifests.of_kind("NetworkPolicy")
    leaving = [p for p in policies if selects(p["spec"]["podSelector"], labels(source))]
    entering = [p for p in policies if selects(p["spec"]["podSelector"], labels(target))]
    may_leave = not leaving or any(
        port_fits(r, port) and peer_fits(r.get("to"), target) for p in leaving for r in p["spec"]["egress"]
    )
    may_enter = not entering or any(
        port_fits(r, port) and peer_fits(r.get("from"), source)
        for p in entering
        for r in p["spec"]["ingress"]
    )
    return may_leave and may_enter


PORTS = {
    "gateway": 50050,
    "verifier": 50051,
    "drafter": 50052,
    "scheduler": 50053,
    "orchestrator": 50054,
    "redis": 6379,
}
WANTED = {
    "colocated": {
        ("gateway", "orchestrator"),
        ("orchestrator", "verifier"),
        ("orchestrator", "scheduler"),
        ("scheduler", "redis"),
    },
    "separate": {
        ("gateway", "orchestrator"),
        ("orchestrator", "verifier"),
        ("orchestrator", "drafter"),
        ("orchestrator", "scheduler"),
        ("drafter", "verifier"),
        ("scheduler", "redis"),
    },
}


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_each_call_of_the_design_is_open_and_every_other_closed(render: Any, placement: str) -> None:
    manifests = render(placement=placement)
    roles = [r for r in PORTS if r != "drafter" or placement == "separate"]
    open_calls = {
        (source, target)
        for source in roles
        for target in roles
        if source != target and target != "gateway" and allows(manifests, source, target, PORTS[target])
    }
    assert open_calls == WANTED[placement]


def test_the_gateway_reaches_conductors_on_ephemeral_ports(render: Any) -> None:
    manifests = render()
    assert allows(manifests, "gateway", "orchestrator", 40000)
    assert not allows(manifests, "gateway", "orchestrator", 6379)
    assert not allows(manifests, "scheduler", "orchestrator", 40000)


def test_the_gateway_is_open_to_all_or_to_those_named(render: Any) -> None:
    assert allows(render(), "stranger", "gateway", 50050)
    team = [{"podSelector": {"matchLabels": labels("friend")}}]
    manifests = render(networkPolicy={"gatewayFrom": team})
    assert allows(manifests, "friend", "gateway", 50050)
    assert allows(manifests, "test", "gateway", 50050), "helm test must get through"
    assert not allows(manifests, "stranger", "gateway", 50050)


def test_ray_nodes_talk_among_themselves_alone(render: Any) -> None:
    manifests = render(orchestrator=KUBERAY)
    assert allows(manifests, "orchestrator", "ray-worker", 6380)
    assert allows(manifests, "ray-worker", "orchestrator", 6379)
    assert allows(manifests, "ray-worker", "verifier", 50051), "conductors run on workers"
    assert allows(manifests, "ray-worker", "scheduler", 50053)
    assert allows(manifests, "gateway", "ray-worker", 40000)
    for stranger in ("gateway", "verifier", "scheduler", "redis"):
        assert not allows(manifests, stranger, "orchestrator", 6379)


def test_only_pods_that_fetch_reach_the_index(render: Any) -> None:
    def reaches_web(manifests: Any, role: str) -> bool:
        rules = manifests.get("NetworkPolicy", f"-{role}")["spec"]["egress"]
        return any(p["port"] == 443 for rule in rules for p in rule["ports"])

    fetched = render()
    assert [r for r in ("gateway", "verifier", "scheduler", "orchestrator") if reaches_web(fetched, r)] == [
        "gateway",
        "verifier",
    ]
    claimed = render(model={"source": "pvc", "pvc": {"existingClaim": "weights"}})
    assert not any(reaches_web(claimed, r) for r in ("gateway", "verifier", "scheduler", "orchestrator"))


def test_everyone_may_ask_for_names(render: Any) -> None:
    for policy in render(placement="separate").of_kind("NetworkPolicy"):
        if not policy["metadata"]["name"].endswith("-redis"):
            assert {"port": 53, "protocol": "UDP"} in policy["spec"]["egress"][0]["ports"]


def test_policies_are_absent_when_off(render: Any) -> None:
    assert render(networkPolicy={"enabled": False}).of_kind("NetworkPolicy") == []
