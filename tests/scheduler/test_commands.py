"""`paceline curves` and `paceline policy`, reading a real Redis and a real scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from typer.testing import CliRunner

from paceline.contract.errors import InvalidRequestError, UnavailableError
from paceline.embedded.record import recorded, running
from paceline.embedded.redis_server import RedisServer
from services.scheduler.commands import sources
from services.scheduler.commands.curves import curves
from services.scheduler.commands.policy import policy
from services.scheduler.subject import Subject


@pytest.fixture(autouse=True)
def _quiet_scheduler() -> Iterator[None]:
    """The scheduler of these tests runs in the test's process; its log must not mix with the command's output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), processors=[])
    yield
    structlog.reset_defaults()


def run(command: Any, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


async def called(command: Any, *arguments: str) -> str:
    """In a thread, so that the test's own scheduler can answer."""
    return await asyncio.to_thread(run, command, *arguments)


def frames_of(harness: Any) -> Any:
    frames = harness.frames()
    for frame in frames:
        frame.peers.add(conductor="here:1", drafter="there:2")
        frame.round_trip_peers.extend([0] * len(frame.round_trips_us))
        frame.queues_us.append(120)
        frame.queue_peers.append(0)
        frame.acceptance.add(
            drafter="eagle3/abc",
            cells=[200, 256 + 100],
            trials=[100, 80],
            accepted=[70, 30],
            calibrated=[178, 96],
            calibrated_trials=[100, 80],
            calibrated_accepted=[70, 30],
        )
    return frames


async def test_both_sources_show_the_same(harness: Any, redis_server: RedisServer, tmp_path: Path) -> None:
    model = harness.key.model_fingerprint
    async with harness.scheduler(redis_server.url) as (process, stub):
        await harness.report(stub, frames_of(harness))
        await harness.snapshot_when(stub, lambda s: s.policy.reason.startswith("length "))
        endpoint = f"127.0.0.1:{process.port}"
        asked = json.loads(await called(curves, "--scheduler", endpoint, "--json", "-"))
        shown = await called(policy, "--scheduler", endpoint)
        assert "in force: length" in shown
    arguments = ("--redis", redis_server.url, "--model", model[:12])
    read = json.loads(await called(curves, *arguments, "--json", "-"))
    assert [one["key"] for one in read] == [one["key"] for one in asked]
    stats = read[0]["figures"]
    assert stats == asked[0]["figures"]
    assert [row["rows"] for row in stats["step"]["rows"]] == [1, 2, 5, 9]
    assert stats["step"]["rows"][0]["measured_s"] == pytest.approx(0.0201)
    assert stats["peers"][0]["drafter"] == "there:2"
    assert stats["peers"][0]["round_trip_p50_s"] == pytest.approx(5e-4, rel=0.1)
    assert stats["peers"][0]["queue_p50_s"] == pytest.approx(1.2e-4, rel=0.1)
    (drafter,) = stats["drafters"]
    assert drafter["calibrated_error"] == pytest.approx(0.0, abs=0.005)
    assert drafter["own_error"] == pytest.approx((100 * (200 / 255 - 0.7) + 80 * (100 / 255 - 0.375)) / 180)
    assert read[0]["acceptance"]["count"] == 800
    text = await called(curves, *arguments, "--plot", str(tmp_path / "curves.png"))
    for expected in ("step time", "draft time", "there:2", "acceptance by position", "eagle3/abc"):
        assert expected in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    history = json.loads(await called(policy, *arguments, "--json", "-"))[0]["history"]
    assert history[0]["reason"].startswith("length ")
    assert "cold start" in history[-1]["reason"]
    assert "cold start" in await called(policy, *arguments, "--plot", str(tmp_path / "policy.svg"))
    assert "<svg" in (tmp_path / "policy.svg").read_text()


async def test_values_of_another_layout_are_not_shown(harness: Any, redis_server: RedisServer) -> None:
    import redis

    subject = Subject.from_proto(harness.key)
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(subject.redis_key("curve"), '{"schema_version": 1, "buckets": []}')
        client.set(subject.redis_key("network"), "garbage")
        client.set(subject.redis_key("policy"), '"no"')
    arguments = ("--redis", redis_server.url, "--model", harness.key.model_fingerprint)
    (one,) = json.loads(await called(curves, *arguments, "--json", "-"))
    assert one["figures"] == {}
    assert one["policy"] is None


async def test_what_cannot_be_read_is_an_error(redis_server: RedisServer) -> None:
    with pytest.raises(UnavailableError, match="no measurements"):
        await called(curves, "--redis", redis_server.url, "--model", "nosuchmodel")
    with pytest.raises(UnavailableError):
        await called(policy, "--redis", "redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError):
        await called(policy, "--scheduler", "127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match="not both"):
        await called(curves, "--redis", redis_server.url, "--scheduler", "127.0.0.1:1")


async def test_a_running_deployment_is_found(
    harness: Any, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with harness.scheduler(redis_server.url) as (process, stub):
        await harness.report(stub, frames_of(harness))
        await harness.snapshot_when(stub, lambda s: s.policy.reason.startswith("length "))
        endpoint = f"127.0.0.1:{process.port}"
        with recorded("tiny", "separate", "127.0.0.1:1", endpoint):
            assert "step time" in await called(curves)
            assert "in force: length" in await called(policy)
            (first,) = running()
            (tmp_path / "paceline" / "other.json").write_text(
                json.dumps({**asdict(first), "model": "other", "scheduler": "127.0.0.1:1"})
            )
            with pytest.raises(InvalidRequestError, match=rf"(?s)several.*--scheduler.*other.*{endpoint}"):
                await called(curves)
            assert "in force: length" in await called(policy, "--scheduler", endpoint)


async def test_without_a_deployment_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sources, "DEFAULT_REDIS", "redis://127.0.0.1:1/0")
    for command in (curves, policy):
        with pytest.raises(UnavailableError, match=r"no `paceline up` runs here.*--scheduler .*--redis"):
            await called(command)


def test_keys_are_read_back() -> None:
    subject = Subject("ab", "b:c", "Intel(R): 2 threads", "", "none")
    assert Subject.from_redis_key(subject.redis_key("curve")) == (subject, "curve")
    for other in ("paceline:v1:probe", "elsewhere", subject.redis_key("curve") + ":aside"):
        assert Subject.from_redis_key(other) is None
