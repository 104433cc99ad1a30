"""What commands say before a deployment starts: which flag is missing, and which deployment is meant."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from paceline.cli import gateway
from paceline.cli.gateway import gateway_for
from paceline.cli.launch import choose_placement, find_drafter
from paceline.contract.errors import InvalidRequestError
from paceline.embedded import Placement
from paceline.embedded.ports import Ports
from paceline.embedded.record import Record
from paceline.methods.checkpoint import CheckpointError
from paceline.methods.loading import default_drafter
from tests.gateway.scripted_conductor import Script
from tests.gateway.server_thread import Serve


@pytest.mark.parametrize("placement", [Placement.COLOCATED, Placement.SEPARATE])
def test_a_placement_without_a_drafter_names_the_flag_and_what_ships(placement: Placement) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        choose_placement(placement, None, "models/gemma3-270m", Console())
    for words in (
        f"--placement {placement.value}",
        "gemma3-270m",
        "--drafter DIRECTORY",
        "smollm2-135m-eagle3",
    ):
        assert words in str(caught.value)


def test_plain_decoding_needs_no_drafter() -> None:
    assert choose_placement(Placement.PLAIN, None, "gemma3-270m", Console()) is Placement.PLAIN
    assert choose_placement(None, None, "gemma3-270m", Console(quiet=True)) is Placement.PLAIN


def test_an_unknown_drafter_names_those_that_ship() -> None:
    with pytest.raises(InvalidRequestError, match=r"'nosuch'.*smollm2-135m-eagle3 for smollm2-135m"):
        find_drafter("nosuch", "smollm2-135m")


def test_a_benchmark_without_a_drafter_names_those_that_ship() -> None:
    with pytest.raises(
        CheckpointError, match=r"gemma3-270m.*--drafter.*smollm2-135m-eagle3 for smollm2-135m"
    ):
        default_drafter("gemma3-270m")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's deployments; none runs at the default port."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(gateway, "FIRST_PORT", Ports.free().grpc["gateway"])
    folder = tmp_path / "paceline"
    folder.mkdir(mode=0o700)
    return folder


def add(folder: Path, name: str, endpoint: str) -> None:
    own = psutil.Process()
    record = Record(own.pid, own.create_time(), name, "separate", endpoint, "127.0.0.1:1")
    (folder / f"{name}.json").write_text(json.dumps(asdict(record)))


def test_a_running_deployment_is_found_at_any_port(serve: Serve, records: Path) -> None:
    endpoint = serve(Script([1, 2])).endpoint
    add(records, "one", endpoint)
    add(records, "silent", "127.0.0.1:1")
    with gateway_for(None, "m", None, None, "auto", Console()) as found:
        assert found == endpoint


def test_several_running_deployments_are_listed(serve: Serve, records: Path) -> None:
    endpoints = {name: serve(Script([1, 2])).endpoint for name in ("one", "two")}
    for name, endpoint in endpoints.items():
        add(records, name, endpoint)
    with (
        pytest.raises(InvalidRequestError, match="several deployments") as caught,
        gateway_for(None, "m", None, None, "auto", Console()),
    ):
        pass
    for name, endpoint in endpoints.items():
        assert f"{name}, separate" in str(caught.value)
        assert endpoint in str(caught.value)
    with gateway_for(endpoints["two"], "m", None, None, "auto", Console()) as found:
        assert found == endpoints["two"]
