"""What runs: pods, placements, probes, resources, models, and what is absent when it is off."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.chart

PORTS = {
    "gateway": (50050, 9100),
    "verifier": (50051, 9101),
    "drafter": (50052, 9102),
    "scheduler": (50053, 9103),
    "orchestrator": (50054, 9104),
}
KUBERAY = {
    "ray": {
        "mode": "kuberay",
        "kuberay": {"workers": {"replicas": 2}, "authTokenSecret": {"name": "ray-token"}},
    }
}


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(arg.split("=", 1) for arg in container["args"])


def all_containers(manifests: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{owner}/{container['name']}", container)
        for owner, template in manifests.pod_templates()
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]
    ]


def test_colocated_hosts_the_drafter_in_the_verifier(render: Any) -> None:
    manifests = render(placement="colocated")
    assert flags(manifests.main_container("verifier"))["--drafter"].startswith(
        "/opt/paceline/share/drafters/"
    )
    orchestrator = flags(manifests.main_container("orchestrator"))
    assert orchestrator["--placement"] == "colocated"
    assert "--drafters" not in orchestrator
    assert [
        item["metadata"]["name"] for item in manifests.objects if "drafter" in item["metadata"]["name"]
    ] == []


def test_separate_hosts_the_drafter_in_a_pool(render: Any) -> None:
    manifests = render(placement="separate", drafter={"replicas": 3}, verifier={"replicas": 2})
    verifier = flags(manifests.main_container("verifier"))
    assert "--drafter" not in verifier
    assert verifier["--tap-from"] == flags(manifests.main_container("drafter"))["--drafter"]
    assert manifests.get("StatefulSet", "-drafter")["spec"]["replicas"] == 3
    orchestrator = flags(manifests.main_container("orchestrator"))
    assert orchestrator["--placement"] == "separate"
    drafters = [f"demo-paceline-drafter-{i}.demo-paceline-drafter:50052" for i in range(3)]
    assert orchestrator["--drafters"].split(",") == drafters
    assert len(orchestrator["--verifiers"].split(",")) == 2


def test_every_address_in_a_flag_is_a_service_and_port_of_the_release(
    render: Any, flavour: dict[str, Any]
) -> None:
    manifests = render(**flavour)
    services = {
        s["metadata"]["name"]: {p["port"] for p in s["spec"]["ports"]} for s in manifests.of_kind("Service")
    }
    sets = {s["metadata"]["name"]: s["spec"]["serviceName"] for s in manifests.of_kind("StatefulSet")}
    seen = 0
    for role in ("gateway", "orchestrator"):
        for flag, value in flags(manifests.main_container(role)).items():
            if flag not in ("--orchestrator", "--verifiers", "--drafters", "--scheduler"):
                continue
            for address in value.split(","):
                host, _, port = address.rpartition(":")
                pod, _, service = host.rpartition(".")
                assert int(port) in services[service], address
                if pod:
                    assert sets[pod.rpartition("-")[0]] == service
                seen += 1
    assert seen >= 3


def test_every_process_has_its_ports_in_args_container_and_service(render: Any) -> None:
    manifests = render(placement="separate")
    for role, (port, metrics_port) in PORTS.items():
        container = manifests.main_container(role)
        assert flags(container)["--host"] == "0.0.0.0"
        assert int(flags(container)["--port"]) == port
        assert int(flags(container)["--metrics-port"]) == metrics_port
        assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
            "grpc": port,
            "metrics": metrics_port,
        }
        service = manifests.get("Service", f"-{role}-pods" if role == "gateway" else f"-{role}")
        assert service["spec"]["clusterIP"] == "None"
        assert {p["name"]: p["targetPort"] for p in service["spec"]["ports"]} == {
            "grpc": port,
            "metrics": metrics_port,
        }


def test_selectors_match_labels_and_ports_match_containers(render: Any, flavour: dict[str, Any]) -> None:
    manifests = render(**flavour)
    pods = [t for owner, t in manifests.pod_templates()]
    for item in manifests.of_kind("Deployment") + manifests.of_kind("StatefulSet"):
        wanted = item["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= item["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        *((s, s["spec"]["selector"]) for s in manifests.of_kind("Service")),
        *((s, s["spec"]["selector"]["matchLabels"]) for s in manifests.of_kind("PodDisruptionBudget")),
        *((s, s["spec"]["podSelector"]["matchLabels"]) for s in manifests.of_kind("NetworkPolicy")),
    ]
    for item, selector in selectors:
        matched = [p for p in pods if selector.items() <= p["metadata"]["labels"].items()]
        assert matched, f"{item['kind']} {item['metadata']['name']} selects nothing"
        if item["kind"] == "Service":
            components = {p["metadata"]["labels"]["app.kubernetes.io/component"] for p in matched}
            assert len(components) == 1
            exposed = {p["containerPort"] for c in matched[0]["spec"]["containers"] for p in c["ports"]}
            assert {p["targetPort"] for p in item["spec"]["ports"]} <= exposed


def test_names_are_unique_and_every_reference_exists(render: Any, flavour: dict[str, Any]) -> None:
    manifests = render(**flavour)
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests.objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)
    outside = {"weights", "models", "paceline-redis", "ray-token"}  # claims and Secrets that values name
    for owner, template in manifests.pod_templates():
        spec = template["spec"]
        if "serviceAccountName" in spec:
            assert ("ServiceAccount", spec["serviceAccountName"]) in names, owner
        volumes = {v["name"]: v for v in spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                assert ("Secret", name) in names or name in outside
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in outside
        claims = {"data"} if "redis" in owner else set()
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes) | claims
            for source in container.get("envFrom", []):
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
            for variable in container.get("env", []):
                ref = variable.get("valueFrom", {}).get("secretKeyRef")
                if ref:
                    assert ("Secret", ref["name"]) in names or ref["name"] in outside


def test_pods_are_restricted(render: Any, flavour: dict[str, Any]) -> None:
    manifests = render(**flavour)
    for owner, template in manifests.pod_templates():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, owner
        assert spec["enableServiceLinks"] is False, owner
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all("hostPath" not in v for v in spec["volumes"])
    for name, container in all_containers(manifests):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert "memory" in container["resources"]["limits"], name
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
        mounts = {m["mountPath"] for m in container["volumeMounts"]}
        assert "/tmp" in mounts, f"{name} has nowhere to write"
        assert container["image"].rpartition(":")[2] not in ("", "latest"), name
        for port in container.get("ports", []):
            assert port["name"], name
            assert port["protocol"] == "TCP", name


def test_probes_and_end_of_life(render: Any) -> None:
    manifests = render(
        placement="separate", lifecycle={"preStopSeconds": 7, "drainSeconds": 40, "marginSeconds": 3}
    )
    for role, (port, _) in PORTS.items():
        container = manifests.main_container(role)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == port, (role, probe)
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == 900
        assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
        assert flags(container)["--drain-s"] == "40"
    for owner, template in manifests.pod_templates():
        if "redis" not in owner and not owner.startswith("Pod/"):
            assert template["spec"]["terminationGracePeriodSeconds"] == 50, owner


def test_accelerators_are_values(render: Any) -> None:
    gpu = {
        "gpu": {"resource": "amd.com/gpu", "count": 2},
        "runtimeClassName": "special",
        "nodeSelector": {"pool": "big"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "shmSize": "8Gi",
    }
    manifests = render(placement="separate", verifier=gpu)
    spec = manifests.get("StatefulSet", "-verifier")["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["amd.com/gpu"] == 2
    assert flags(spec["containers"][0])["--device"] == "cuda:0"
    assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("special", {"pool": "big"})
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    other = manifests.get("StatefulSet", "-drafter")["spec"]["template"]["spec"]
    assert set(other["containers"][0]["resources"]["limits"]) == {"memory"}
    assert flags(other["containers"][0])["--device"] == "cpu"
    assert not {"runtimeClassName", "nodeSelector", "tolerations"} & set(other)


def test_an_explicit_device_wins(render: Any) -> None:
    manifests = render(verifier={"device": "cuda:1", "gpu": {"resource": "nvidia.com/gpu", "count": 2}})
    assert flags(manifests.main_container("verifier"))["--device"] == "cuda:1"


def test_the_model_comes_from_the_index_or_a_claim(render: Any) -> None:
    fetched = render(model={"fetch": {"indexUrl": "https://index.example.com/simple"}})
    for kind, role in (("StatefulSet", "verifier"), ("Deployment", "gateway")):
        spec = fetched.get(kind, f"-{role}")["spec"]["template"]["spec"]
        (init,) = spec["initContainers"]
        assert init["args"][:3] == ["models", "fetch", "smollm2-135m"]
        assert {"name": "PIP_INDEX_URL", "value": "https://index.example.com/simple"} in init["env"]
        assert flags(spec["containers"][0])["--model"] == "/var/lib/paceline/models/smollm2-135m"
        assert {"name": "models", "mountPath": "/var/lib/paceline/models", "readOnly": True} in spec[
            "containers"
        ][0]["volumeMounts"]
    claimed = render(
        model={"name": "big", "source": "pvc", "pvc": {"existingClaim": "weights", "path": "a/b"}}
    )
    for kind, role in (("StatefulSet", "verifier"), ("Deployment", "gateway")):
        spec = claimed.get(kind, f"-{role}")["spec"]["template"]["spec"]
        assert "initContainers" not in spec
        claim = {"claimName": "weights", "readOnly": True}
        assert {"name": "models", "persistentVolumeClaim": claim} in spec["volumes"]
        assert flags(spec["containers"][0])["--model"] == "/var/lib/paceline/models/a/b"


def test_settings_become_variables_and_restart_their_pods_alone(render: Any) -> None:
    plain, changed = render(), render(scheduler={"settings": {"log_level": "debug", "log_json": False}})
    assert changed.get("ConfigMap", "-scheduler")["data"] == {
        "PACELINE_SCHEDULER_LOG_LEVEL": "debug",
        "PACELINE_SCHEDULER_LOG_JSON": "false",
    }

    def checksum(manifests: Any, kind: str, role: str) -> str:
        annotations = manifests.get(kind, f"-{role}")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum(plain, "Deployment", "scheduler") != checksum(changed, "Deployment", "scheduler")
    assert checksum(plain, "Deployment", "gateway") == checksum(changed, "Deployment", "gateway")


def test_disruption_budgets(render: Any) -> None:
    manifests = render(
        verifier={"pdb": {"enabled": True, "maxUnavailable": 0}}, gateway={"pdb": {"enabled": False}}
    )
    assert manifests.get("PodDisruptionBudget", "-verifier")["spec"]["maxUnavailable"] == 0
    assert manifests.find("PodDisruptionBudget", "-gateway") is None
    assert manifests.get("PodDisruptionBudget", "-orchestrator")["spec"]["maxUnavailable"] == 1


def test_singletons_never_overlap(render: Any) -> None:
    manifests = render()
    for role in ("scheduler", "orchestrator"):
        spec = manifests.get("Deployment", f"-{role}")["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_service_monitor_is_absent_unless_asked_for(render: Any) -> None:
    assert render().of_kind("ServiceMonitor") == []
    manifests = render(
        metrics={"serviceMonitor": {"enabled": True, "labels": {"team": "x"}}}, placement="separate"
    )
    (monitor,) = manifests.of_kind("ServiceMonitor")
    assert monitor["metadata"]["labels"]["team"] == "x"
    wanted = monitor["spec"]["selector"]["matchLabels"]
    matched = [s for s in manifests.of_kind("Service") if wanted.items() <= s["metadata"]["labels"].items()]
    assert len(matched) == 5
    (endpoint,) = monitor["spec"]["endpoints"]
    assert all(endpoint["port"] in {p["name"] for p in s["spec"]["ports"]} for s in matched)


def test_embedded_ray_is_a_plain_deployment(render: Any) -> None:
    manifests = render()
    assert manifests.of_kind("RayCluster") == []
    assert "--ray-address" not in flags(manifests.main_container("orchestrator"))
    spec = manifests.get("Deployment", "-orchestrator")["spec"]["template"]["spec"]
    assert spec["shareProcessNamespace"] is True


def test_kuberay_runs_the_orchestrator_beside_the_head(render: Any, root: Any) -> None:
    manifests = render(orchestrator=KUBERAY)
    assert manifests.find("Deployment", "-orchestrator") is None
    (cluster,) = manifests.of_kind("RayCluster")
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={cluster['spec']['rayVersion']}" in pins
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    ray_head, orchestrator = head["containers"]
    assert (ray_head["name"], orchestrator["name"]) == ("ray-head", "orchestrator")
    # A driver looks for its raylet in /proc and connects to sockets under /tmp.
    assert head["shareProcessNamespace"] is True
    for container in head["containers"]:
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "RAY_AUTH_TOKEN_PATH", "value": "/run/secrets/ray/token"} in container["env"]
    assert flags(orchestrator)["--ray-address"] == "127.0.0.1:6379"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["replicas"] == 2
    worker = workers["template"]["spec"]["containers"][0]
    assert "--address=demo-paceline-orchestrator:6379" in worker["args"]
    assert 6379 in {p["port"] for p in manifests.get("Service", "-orchestrator")["spec"]["ports"]}


def test_kuberay_without_workers_has_no_worker_group(render: Any) -> None:
    ray = {"mode": "kuberay", "kuberay": {"authTokenSecret": {"name": "ray-token"}}}
    (cluster,) = render(orchestrator={"ray": ray}).of_kind("RayCluster")
    assert "workerGroupSpecs" not in cluster["spec"]


def test_the_helm_test_sends_a_real_request(render: Any) -> None:
    manifests = render()
    (pod,) = manifests.of_kind("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    container = pod["spec"]["containers"][0]
    assert container["args"][0] == "generate"
    assert "--endpoint=demo-paceline-gateway:50050" in container["args"]
    assert 50050 in {p["port"] for p in manifests.get("Service", "-gateway")["spec"]["ports"]}


def test_notes_say_how_to_call_it(render: Any) -> None:
    notes = render(networkPolicy={"enabled": False}).notes
    assert "service/demo-paceline-gateway 50050:50050" in notes
    assert "Network policies are off" in notes


def test_a_registry_and_tag_apply_to_every_image_of_ours(render: Any) -> None:
    manifests = render(placement="separate", image={"registry": "r.example.com/x/", "tag": "1.2.3"})
    images = {c["image"] for name, c in all_containers(manifests) if "redis" not in name}
    roles = ("gateway", "verifier", "drafter", "scheduler", "orchestrator")
    assert images == {f"r.example.com/x/paceline/{role}:1.2.3" for role in roles}
