"""What the other deployments leave out: draft lengths, unlike neighbours, shared prefixes, a second verifier."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Completion, PacelineClient
from paceline.embedded import Deployment, DeploymentOptions, Placement
from paceline.embedded.ports import Ports
from paceline.embedded.process import ChildProcess
from tests.integration.conftest import Site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_TOKENS = 20
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77, "max_tokens": NUM_TOKENS}
START_TIMEOUT_S = 180.0


class TwoVerifiers(Site):
    """A deployment whose orchestrator knows a second verifier."""

    def __init__(self, deployment: Deployment, client: PacelineClient, second_metrics: int) -> None:
        super().__init__(deployment, client)
        self._second_metrics_url = f"http://127.0.0.1:{second_metrics}/metrics"

    def count(self, metric: str, *, second_only: bool = False) -> float:
        """A counter of the verifiers, added up."""
        own = [] if second_only else [self.deployment.metrics_url("verifier")]
        total = 0.0
        for url in [*own, self._second_metrics_url]:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
            total += sum(map(float, re.findall(rf"^{metric}{{.*}} (\S+)$", text, re.MULTILINE)))
        return total


@pytest.fixture(scope="module")
def pair(
    model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoVerifiers]:
    """Chains of up to 16; room for few sequences at once; requests move on a second after their verifier died."""
    ports, second, directory = Ports.free(), Ports.free(), tmp_path_factory.mktemp("second")
    port, metrics_port = second.grpc["verifier"], second.metrics["verifier"]
    options = DeploymentOptions(
        model=model_dir,
        drafter=drafter_dir,
        placement=Placement.SEPARATE,
        dtype="float32",
        draft_length=16,
        max_nodes=16,
        hold_us=200_000,
        ports=ports,
        extra_flags={
            "verifier": ("--kv-limit-mib", "64"),
            "orchestrator": (
                "--verifiers",
                f"127.0.0.1:{ports.grpc['verifier']},127.0.0.1:{port}",
                "--resume-timeout-s",
                "1",
            ),
        },
    )
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--model", str(model_dir)]
    flags += ["--dtype", "float32", "--threads", "1", "--tap-from", str(drafter_dir)]
    flags += ["--ready-file", str(directory / "ready")]
    other = ChildProcess(
        "verifier",
        "services.verifier",
        flags,
        environment={},
        cores=(),
        log_path=directory / "log",
        ready_file=directory / "ready",
    )
    try:
        with Deployment(options) as deployment, PacelineClient(deployment.gateway_endpoint) as client:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not other.is_ready:
                assert other.exit_code is None, other.last_lines()
                assert time.monotonic() < deadline, "the second verifier did not start"
                time.sleep(0.05)
            yield TwoVerifiers(deployment, client, metrics_port)
    finally:
        other.stop(5.0)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_draft_length_gives_the_plain_text(
    pair: TwoVerifiers, prompts: list[str], sampling: dict[str, Any]
) -> None:
    plain = pair.complete(prompts[3], speculation=False, **sampling).token_ids
    for max_draft_tokens in (1, 4, 16):
        drafted = pair.complete(prompts[3], max_draft_tokens=max_draft_tokens, **sampling)
        assert drafted.token_ids == plain
        assert 0 < len(drafted.stats.drafted_per_position) <= max_draft_tokens


def test_sixteen_unlike_neighbours_with_room_for_few(pair: TwoVerifiers, prompts: list[str]) -> None:
    long = " ".join(["The cyclists took turns at the front."] * 60)
    requests: list[tuple[str, dict[str, Any]]] = []
    for which in range(16):
        prompt = (prompts[which % 8], "Hi.", f"{long} {prompts[which % 4]}", prompts[which % 3])[which % 4]
        sampling = GREEDY if which % 3 else {**SAMPLED, "seed": which}
        requests.append((prompt, {**sampling, "max_tokens": 8 + which % 9}))
    alone = [pair.complete(prompt, speculation=False, **sampling).token_ids for prompt, sampling in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(
            pool.map(
                lambda which: pair.complete(
                    requests[which][0], speculation=which % 5 != 0, **requests[which][1]
                ),
                range(16),
            )
        )
    assert [completion.token_ids for completion in together] == alone
    assert sum(completion.stats.num_accepted_tokens for completion in together) > 0


def test_a_prompt_that_came_before_is_not_run_again(pair: TwoVerifiers, prompts: list[str]) -> None:
    prompt = f"{prompts[5]} Say it in other words."
    first = pair.complete(prompt, **GREEDY)
    num_runs = []
    for _ in range(6):  # the other verifier has to run it once
        run, saved = pair.count("vllm:prompt_tokens_total"), pair.count("vllm:prefix_cache_hits_total")
        again = pair.complete(prompt, **GREEDY)
        assert again.token_ids == first.token_ids
        num_runs.append(pair.count("vllm:prompt_tokens_total") - run)
        if num_runs[-1] == 0:
            num_saved = pair.count("vllm:prefix_cache_hits_total") - saved
            assert num_saved == again.stats.num_prompt_tokens - 1
            return
    raise AssertionError(f"the prompt was run every time: {num_runs} tokens")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_moves_to_the_other_verifier(
    pair: TwoVerifiers, prompts: list[str], sampling: dict[str, Any]
) -> None:
    request = {**sampling, "max_tokens": 40}
    expected = pair.complete(prompts[6], speculation=False, **request).token_ids
    for _ in range(10):
        before = pair.count("vllm:generation_tokens_total", second_only=True)
        stream = pair.client.generate(
            [{"role": "user", "content": prompts[6]}], max_draft_tokens=1, **request
        )
        events = [next(stream), next(stream)]
        if pair.count("vllm:generation_tokens_total", second_only=True) == before:
            break
        list(stream)  # this one was placed there from the start
    else:
        raise AssertionError("no request was placed on the first verifier")
    pair.deployment.kill("verifier")
    moved = Completion.from_events([*events, *stream])
    assert moved.token_ids == expected
    assert pair.count("vllm:generation_tokens_total", second_only=True) > before
    pair.deployment.restart("verifier")
