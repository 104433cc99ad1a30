"""The bundled Redis: its rendered configuration and users, in a real server; and the ways to bring one's own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from paceline.embedded.redis_server import find_server_binary

pytestmark = pytest.mark.chart


def secret(manifests: Any, suffix: str) -> dict[str, str]:
    return dict(manifests.get("Secret", suffix)["stringData"])


def wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while not socket.exists():
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Starts a server with the given arguments on a socket file of its own, and no port."""
    started: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str]) -> Path:
        socket = tmp_path / "s"
        command = [str(find_server_binary()), *arguments, "--port", "0", "--dir", str(tmp_path)]
        process = subprocess.Popen([*command, "--unixsocket", str(socket)], stdout=subprocess.DEVNULL)
        started.append(process)
        wait_for(socket, process)
        return socket

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_bundled_server_knows_one_user_who_cannot_destroy(
    render: Any, server: Any, tmp_path: Path
) -> None:
    manifests = render(redis={"enabled": True, "password": "p@ss/word+1"})
    (tmp_path / "users.acl").write_text(secret(manifests, "-redis-server")["users.acl"])
    conf = manifests.get("ConfigMap", "-redis")["data"]["redis.conf"]
    assert "aclfile /etc/redis-users/users.acl" in conf
    (tmp_path / "redis.conf").write_text(
        conf.replace("/etc/redis-users/", f"{tmp_path}/").replace("/data", str(tmp_path))
    )
    socket = server([str(tmp_path / "redis.conf")])

    flags = dict(arg.split("=", 1) for arg in manifests.main_container("scheduler")["args"])
    assert flags["--redis-url"] == "redis://demo-paceline-redis:6379/0"
    password = secret(manifests, "-redis-client")[Path(flags["--redis-password-file"]).name]
    user = flags["--redis-username"]
    with redis.Redis(unix_socket_path=str(socket), username=user, password=password) as client:
        assert client.set("k", "v", ex=60)
        assert client.eval("return redis.call('GET', KEYS[1])", 1, "k") == b"v"
        assert client.info("server")
        for command in ("FLUSHALL", "CONFIG GET *", "SHUTDOWN NOSAVE"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
    with (
        redis.Redis(unix_socket_path=str(socket)) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.get("k")


def test_the_compose_server_starts_with_its_command(root: Path, server: Any, tmp_path: Path) -> None:
    compose = yaml.safe_load((root / "deploy/compose.yaml").read_text(encoding="utf-8"))
    command = compose["services"]["redis"]["command"]
    socket = server([str(tmp_path) if argument == "/data" else argument for argument in command])
    with redis.Redis(unix_socket_path=str(socket)) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-ttl"


def test_a_random_password_is_long_and_known_to_both_sides(render: Any) -> None:
    manifests = render()
    first, second = secret(manifests, "-redis-client"), secret(render(), "-redis-client")
    digest = hashlib.sha256(first["redis-password"].encode()).hexdigest()
    assert f"#{digest} " in secret(manifests, "-redis-server")["users.acl"]
    assert len(first["redis-password"]) >= 32
    assert first["redis-password"] != second["redis-password"]


def test_the_password_is_never_in_a_pod(render: Any) -> None:
    manifests = render(redis={"enabled": True, "password": "correct-horse"})
    for item in manifests.objects:
        if item["metadata"]["name"] != "demo-paceline-redis-client":
            assert "correct-horse" not in str(item)


@pytest.mark.parametrize(
    ("external", "secret_name", "key"),
    [
        ({"externalUrl": "redis://elsewhere:6379/0"}, "demo-paceline-redis-client", "redis-url"),
        ({"existingSecret": {"name": "mine", "key": "url"}}, "mine", "url"),
    ],
)
def test_an_external_url_comes_by_reference(
    render: Any, external: dict[str, Any], secret_name: str, key: str
) -> None:
    manifests = render(redis={"enabled": False, **external})
    container = manifests.main_container("scheduler")
    (variable,) = container["env"]
    assert variable["name"] == "PACELINE_SCHEDULER_REDIS_URL"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": secret_name, "key": key}
    assert not [arg for arg in container["args"] if "redis" in arg]
    assert not [item for item in manifests.objects if item["metadata"]["name"] == "demo-paceline-redis"]
    if secret_name == "mine":
        assert manifests.of_kind("Secret") == []
    else:
        assert secret(manifests, "-redis-client") == {"redis-url": "redis://elsewhere:6379/0"}


def test_the_bundled_password_comes_as_a_file(render: Any) -> None:
    manifests = render()
    container = manifests.main_container("scheduler")
    assert "env" not in container
    assert {"name": "redis-password", "mountPath": "/run/secrets/redis", "readOnly": True} in container[
        "volumeMounts"
    ]


def test_persistence_is_a_claim_or_nothing(render: Any) -> None:
    kept = render(redis={"enabled": True, "persistence": {"storageClass": "fast"}}).get(
        "StatefulSet", "-redis"
    )["spec"]
    (claim,) = kept["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    lost = render(redis={"enabled": True, "persistence": {"enabled": False}}).get("StatefulSet", "-redis")[
        "spec"
    ]
    assert "volumeClaimTemplates" not in lost
    assert any(v["name"] == "data" and "emptyDir" in v for v in lost["template"]["spec"]["volumes"])


def test_the_suite_has_a_server_to_start() -> None:
    assert shutil.which(str(find_server_binary()))
