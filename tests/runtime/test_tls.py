"""Mutual TLS between our channels and servers, and rotation without a restart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.channel import open_channel
from services.runtime.process import Process
from services.runtime.settings import ServerSettings
from services.runtime.tls import Tls
from tests.hosting import hosted

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program"),
]


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True, timeout=30)


def make_authority(directory: Path) -> Path:
    directory.mkdir()
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"),
        *("-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"),
        cwd=directory,
    )
    return directory


def make_certificate(authority: Path, name: str) -> Tls:
    (authority / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        cwd=authority,
    )
    openssl(
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "1", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        cwd=authority,
    )
    return Tls(authority / f"{name}.pem", authority / f"{name}.key", authority / "ca.pem")


async def build(process: Process) -> None:
    await process.ready()


async def is_serving(port: int, tls: Tls | None) -> bool:
    async with open_channel(f"localhost:{port}", tls) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def settings(tls: Tls) -> ServerSettings:
    return ServerSettings(tls_cert=tls.cert, tls_key=tls.key, tls_ca=tls.ca, drain_s=0.1)


async def test_only_peers_of_the_authority_get_in(tmp_path: Path) -> None:
    ours, theirs = make_authority(tmp_path / "ours"), make_authority(tmp_path / "theirs")
    server, client = make_certificate(ours, "server"), make_certificate(ours, "client")
    stranger = make_certificate(theirs, "stranger")
    async with hosted("verifier", settings(server), build) as process:
        assert process.tls == server
        assert await is_serving(process.port, client)
        assert not await is_serving(process.port, None)
        assert not await is_serving(process.port, Tls(ca=server.ca))
        assert not await is_serving(process.port, Tls(stranger.cert, stranger.key, server.ca))
        assert not await is_serving(process.port, Tls(client.cert, client.key, stranger.ca))


async def test_rotated_certificate_serves_the_next_connection(tmp_path: Path) -> None:
    old, new = make_authority(tmp_path / "old"), make_authority(tmp_path / "new")
    in_use = tmp_path / "in_use"
    in_use.mkdir()
    tls = Tls(in_use / "tls.crt", in_use / "tls.key", in_use / "ca.crt")

    def install(source: Tls) -> None:
        for target, origin in zip(
            (tls.cert, tls.key, tls.ca), (source.cert, source.key, source.ca), strict=True
        ):
            assert target is not None
            assert origin is not None
            part = target.with_suffix(".part")
            shutil.copyfile(origin, part)
            part.replace(target)

    install(make_certificate(old, "server"))
    old_client, new_client = make_certificate(old, "client"), make_certificate(new, "client")
    async with hosted("verifier", settings(tls), build) as process:
        assert await is_serving(process.port, old_client)
        assert not await is_serving(process.port, new_client)
        install(make_certificate(new, "server"))
        assert await is_serving(process.port, new_client)
        assert not await is_serving(process.port, old_client)
