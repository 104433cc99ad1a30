"""What the other deployments leave out: draft lengths, unlike neighbours, shared prefixes, two of each peer."""

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
from tests.integration.conftest import Site, fast_dtype

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_TOKENS = 20
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 77, "max_tokens": NUM_TOKENS}
START_TIMEOUT_S = 180.0
COUNTED = {
    "verifier": "vllm:spec_decode_num_draft_tokens_total",
    "drafter": r"paceline_drafted_tokens_total.*kind=\"outcome\"",
}


class Pool(Site):
    """A deployment whose orchestrator knows a second verifier and a second drafter."""

    def __init__(self, deployment: Deployment, client: PacelineClient, second: dict[str, int]) -> None:
        super().__init__(deployment, client)
        self._second_urls = {role: f"http://127.0.0.1:{port}/metrics" for role, port in second.items()}

    def count(self, metric: str, *, second_only: bool = False) -> float:
        """A counter of the verifiers, added up."""
        second = _count(self._second_urls["verifier"], metric)
        return second if second_only else second + _count(self.deployment.metrics_url("verifier"), metric)

    def counts(self, metric: str, role: str) -> list[float]:
        """A counter of the first and of the second process of a role."""
        return [_count(url, metric) for url in (self.deployment.metrics_url(role), self._second_urls[role])]


def _count(url: str, metric: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(rf"^{metric}.*}} (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def pair(model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Chains of up to 16, likely outcomes shared by two drafters, two verifiers with room for few sequences at once.

    Requests move on a second after their verifier died.
    """
    ports, second, directory = Ports.free(), Ports.free(), tmp_path_factory.mktemp("second")
    options = DeploymentOptions(
        model=model_dir,
        drafter=drafter_dir,
        placement=Placement.SEPARATE,
        dtype=fast_dtype(),
        draft_length=16,
        max_nodes=16,
        draft_ahead=3,
        num_outcomes=6,
        wait_budget_us=1_000_000,
        ports=ports,
        extra_flags={
            "verifier": ("--kv-limit-mib", "64"),
            "orchestrator": (
                *("--verifiers", f"127.0.0.1:{ports.grpc['verifier']},127.0.0.1:{second.grpc['verifier']}"),
                *("--drafters", f"127.0.0.1:{ports.grpc['drafter']},127.0.0.1:{second.grpc['drafter']}"),
                *("--drafters-per-sequence", "2", "--resume-timeout-s", "1"),
            ),
        },
    )
    own_flags = {
        "verifier": ["--dtype", fast_dtype(), "--tap-from", str(drafter_dir)],
        "drafter": ["--drafter", str(drafter_dir), "--name", "second"],
    }
    others = []
    for role, flags in own_flags.items():
        flags += ["--model", str(model_dir), "--threads", "1", "--port", str(second.grpc[role])]
        flags += [
            "--metrics-port",
            str(second.metrics[role]),
            "--ready-file",
            str(directory / f"{role}.ready"),
        ]
        others.append(
            ChildProcess(
                role,
                f"services.{role}",
                flags,
                environment={},
                cores=(),
                log_path=directory / f"{role}.log",
                ready_file=directory / f"{role}.ready",
            )
        )
    try:
        with Deployment(options) as deployment, PacelineClient(deployment.gateway_endpoint) as client:
            deadline = time.monotonic() + START_TIMEOUT_S
            for other in others:
                while not other.is_ready:
                    assert other.exit_code is None, other.last_lines()
                    assert time.monotonic() < deadline, f"the second {other.name} did not start"
                    time.sleep(0.05)
            yield Pool(deployment, client, second.metrics)
    finally:
        for other in others:
            other.stop(5.0)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_draft_length_gives_the_plain_text(
    pair: Pool, prompts: list[str], sampling: dict[str, Any]
) -> None:
    plain = pair.complete(prompts[3], speculation=False, **sampling).token_ids
    for max_draft_tokens in (1, 4, 16):
        drafted = pair.complete(prompts[3], max_draft_tokens=max_draft_tokens, **sampling)
        assert drafted.token_ids == plain
        assert 0 < len(drafted.stats.drafted_per_position) <= max_draft_tokens


def test_both_drafters_serve_both_verifiers(pair: Pool, prompts: list[str]) -> None:
    """Sequences at either verifier, each with a share of its outcomes at either drafter."""
    before = {role: pair.counts(metric, role) for role, metric in COUNTED.items()}
    plain = [pair.complete(p, speculation=False, **GREEDY).token_ids for p in prompts[:4]]
    with ThreadPoolExecutor(4) as pool:
        drafted = list(pool.map(lambda prompt: pair.complete(prompt, **GREEDY).token_ids, prompts[:4]))
    assert drafted == plain
    for role, metric in COUNTED.items():
        for which, (first, last) in enumerate(zip(before[role], pair.counts(metric, role), strict=True)):
            assert last > first, f"{role} {which} did nothing"
    named = pair.complete(prompts[0], drafter="second", **GREEDY)
    assert named.token_ids == plain[0]
    assert named.stats.num_accepted_tokens > 0


def test_sixteen_unlike_neighbours_with_room_for_few(pair: Pool, prompts: list[str]) -> None:
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


def test_a_prompt_that_came_before_is_not_run_again(pair: Pool, prompts: list[str]) -> None:
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
    pair: Pool, prompts: list[str], sampling: dict[str, Any]
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
