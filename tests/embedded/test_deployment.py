"""A whole deployment of real processes with a tiny model: start, restart, crash, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.client import PacelineClient, RetryPolicy
from paceline.embedded import Deployment, DeploymentOptions, Placement
from paceline.embedded.failure import DeploymentError
from paceline.embedded.ports import is_free
from paceline.embedded.promised_drafter import wait_for_drafter
from paceline.models import model_fingerprint
from tests.gateway.tiny_model import write_model_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
ROOT = Path(paceline.__file__).parent.parent
PATIENT = RetryPolicy(max_attempts=40, base_s=0.2, cap_s=1.0)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights from a fixed seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = write_model_dir(tmp_path_factory.mktemp("tiny-target"))
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def perfect_drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An independent drafter that is the target itself, so that greedy drafts are accepted."""
    directory = tmp_path_factory.mktemp("perfect-drafter")
    shutil.copytree(tiny_target, directory / "model")
    config = {
        "format_version": 1,
        "method": "independent",
        "target_fingerprint": model_fingerprint(tiny_target),
        "shape": {"target_vocab": 300},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def options(model: Path, **fields) -> DeploymentOptions:
    return DeploymentOptions(**{"model": model, "placement": Placement.PLAIN, "dtype": "float32", **fields})


def descendants(pids: Iterable[int]) -> list[psutil.Process]:
    """Processes that still run among these, with all below them."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def consecutive_free_ports() -> int:
    """The first of five free ports in a row."""
    return next(
        first
        for first in range(random.randrange(20_000, 30_000), 32_000)
        if all(map(is_free, range(first, first + 5)))
    )


def test_start_crash_restart_and_an_end_that_leaves_nothing(tiny_target: Path, perfect_drafter: Path) -> None:
    # This drafter is as slow as its target and never pays, so the policy would rightly not use it.
    fixed = {"draft_length": 4, "wait_budget_us": 50_000, "ngram_tokens": 0}
    separate = options(tiny_target, placement=Placement.SEPARATE, drafter=perfect_drafter, **fixed)
    with (
        Deployment(separate) as deployment,
        PacelineClient(deployment.gateway_endpoint, retry=PATIENT, timeout_s=90) as client,
    ):
        assert list(deployment.processes) == list(deployment.roles)
        director = deployment.endpoint("orchestrator")
        assert wait_for_drafter(director, Placement.SEPARATE, 30.0) == ""
        assert wait_for_drafter(director, Placement.PLAIN, 0.0) == ""
        assert "does not answer" in wait_for_drafter("127.0.0.1:1", Placement.SEPARATE, 0.0)
        assert "placement separate" in wait_for_drafter(director, Placement.COLOCATED, 0.0)
        plain = client.complete("hello", max_tokens=24, ignore_eos=True, speculation=False)
        drafted = client.complete("hello", max_tokens=24, ignore_eos=True)
        assert drafted.token_ids == plain.token_ids
        assert plain.stats.num_target_passes == 24
        until(lambda: client.complete("hello", max_tokens=48, ignore_eos=True).stats.num_accepted_tokens > 0)

        deployment.kill("drafter")
        until(lambda: "drafter is not connected" in wait_for_drafter(director, Placement.SEPARATE, 0.0))
        alone = client.complete("hello", max_tokens=24, ignore_eos=True)
        assert (alone.token_ids, alone.stats.no_draft_reason) == (plain.token_ids, "missing")
        assert client.complete("hello", max_tokens=24, ignore_eos=True).token_ids == plain.token_ids

        deployment.kill("gateway")
        assert deployment.dead() == dict.fromkeys(("drafter", "gateway"), -signal.SIGKILL)
        deployment.restart("gateway")
        assert client.complete("hello", max_tokens=24, ignore_eos=True).token_ids == plain.token_ids

        # A killed orchestrator leaves Ray's processes; the end of the deployment finds them.
        directory = deployment.directory
        assert directory is not None
        started = descendants(deployment.processes.values())
        deployment.kill("orchestrator")
        ports = [
            deployment.ports.grpc[role] for role in deployment.processes if role in deployment.ports.grpc
        ]
    until(
        lambda: not [process for process in started if process.is_running() and process.status() != "zombie"]
    )
    assert not directory.exists()
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not listening & set(ports)


def test_a_process_that_does_not_start_says_why_and_leaves_nothing(tiny_target: Path) -> None:
    deployment = Deployment(options(tiny_target, extra_flags={"scheduler": ["--wings", "2"]}))
    with pytest.raises(DeploymentError) as caught:
        deployment.start()
    assert caught.value.role == "scheduler"
    assert any("--wings" in line for line in caught.value.log_lines)
    assert "setting is wrong" in caught.value.hint
    assert deployment.processes == {}
    assert deployment.directory is None


def test_a_taken_port_is_named_before_anything_starts(tiny_target: Path) -> None:
    import socket

    deployment = Deployment(options(tiny_target))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", deployment.ports.grpc["gateway"]))
        holder.listen()
        with pytest.raises(DeploymentError, match="gateway: cannot listen") as caught:
            deployment.start()
    assert "choose other ports" in caught.value.hint


def test_paceline_up_ends_everything_on_ctrl_c(tiny_target: Path, tmp_path: Path) -> None:
    first, first_metrics = consecutive_free_ports(), consecutive_free_ports()
    command = [
        sys.executable,
        "-c",
        "from paceline.cli import main; main()",
        "up",
        "--model",
        str(tiny_target),
    ]
    command += [
        "--placement",
        "plain",
        "--dtype",
        "float32",
        "--port",
        str(first),
        "--metrics-port",
        str(first_metrics),
    ]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    shown = lambda: (tmp_path / "out").read_text()  # noqa: E731
    try:
        until(lambda: "Ctrl-C here ends everything" in shown() or process.poll() is not None, 120)
        assert process.poll() is None, shown()
        assert "verifier: cores" in shown()
        started = descendants([process.pid])
        directories = {
            Path(child.environ()["TMPDIR"])
            for child in started
            if "PACELINE_DEPLOYMENT_ID" in child.environ()
        }
        assert len(directories) == 1
        generate = [*command[:3], "generate", "hello", "--raw", "-n", "5", "--endpoint", f"127.0.0.1:{first}"]
        done = subprocess.run(
            generate,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "tokens per target pass" in done.stdout, done.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, shown()
    finally:
        process.kill()
        process.wait()
    until(lambda: not [child for child in started if child.is_running() and child.status() != "zombie"])
    assert not any(directory.exists() for directory in directories)
