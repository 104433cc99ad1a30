"""Plain and speculative decoding of one deployment in turn, its drafter at one distance after the other.

Responsible for the deployment, the links around its drafter, and pairs of generations. Deliberately does not know:
what is made of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.prompts import Prompt
from experiments.bench.runner import generate
from experiments.bench.sample import Sample
from experiments.link.process import LinkProcess
from paceline.client import PacelineClient
from paceline.embedded import Deployment, DeploymentOptions, Ports

LINKS = {"drafter": "drafter", "features": "verifier"}
"""What crosses the distance, with the role whose port is behind it: the conductor's stream to the drafter, and the
drafter's to the verifier, for features and the tokens beside them."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        round_trips_ms: that the links add between the drafter and everything else.
        cores: the first is the verifier's, the second the drafter's and the link's.
        warm_up: speculative generations at each distance that do not count: the policy learns the distance from them.
        fixed: what is fixed in place of the policy, by `DeploymentOptions`' name; None leaves it to the policy.
    """

    model_dir: Path
    drafter_dir: Path
    dtype: str
    prompts: Sequence[Prompt]
    round_trips_ms: Sequence[float]
    max_tokens: int
    rounds: int
    cores: Sequence[int]
    warm_up: int
    fixed: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt decoded plainly and with drafts, one right after the other; which came first takes turns."""

    round_trip_ms: float
    prompt_id: str
    plain: Sample
    speculative: Sample

    @property
    def speedup(self) -> float:
        """Speed with drafts over plain, of the whole generations."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s


def measure(plan: Plan, progress: Progress) -> list[Pair]:
    """All pairs, distance by distance, of a deployment of their own."""
    progress("starting a deployment")
    with serving(plan) as (client, links):
        return pairs_of(plan, client, links, progress)


def pairs_of(plan: Plan, client: PacelineClient, links: LinkProcess, progress: Progress) -> list[Pair]:
    """All pairs, distance by distance, of a deployment that is up."""
    pairs: list[Pair] = []
    for round_trip_ms in plan.round_trips_ms:
        for name in LINKS:
            links.set_round_trip(name, round_trip_ms)
        progress(f"{round_trip_ms:g} ms: warming up")
        generate(client, plan.prompts[0].text, plan.max_tokens, speculation=False)
        for prompt in plan.prompts[: plan.warm_up]:
            generate(client, prompt.text, plan.max_tokens, speculation=True)
        for round_index in range(plan.rounds):
            for place, prompt in enumerate(plan.prompts):
                progress(f"{round_trip_ms:g} ms, round {round_index + 1}: {prompt.prompt_id}")
                is_plain_first = (place + round_index) % 2 == 0
                samples = {
                    speculation: generate(client, prompt.text, plan.max_tokens, speculation)
                    for speculation in (not is_plain_first, is_plain_first)
                }
                pairs.append(Pair(round_trip_ms, prompt.prompt_id, samples[False], samples[True]))
    return pairs


@contextmanager
def serving(plan: Plan) -> Iterator[tuple[PacelineClient, LinkProcess]]:
    """Verifier and drafter on a core each, and links around the drafter."""
    with ExitStack() as stack:
        ports = Ports.free()
        links = stack.enter_context(
            LinkProcess({name: f"127.0.0.1:{ports.grpc[role]}" for name, role in LINKS.items()})
        )
        os.sched_setaffinity(links.pid, plan.cores[1:2] or plan.cores[:1])
        options = DeploymentOptions(
            model=plan.model_dir,
            drafter=plan.drafter_dir,
            dtype=plan.dtype,
            verifier_cores=tuple(plan.cores[:1]),
            drafter_cores=tuple(plan.cores[1:2] or plan.cores[:1]),
            ports=ports,
            endpoints={name: links.endpoint(name) for name in LINKS},
            # Rounds repeat their prompts; each time they are to be run.
            extra_flags={"verifier": ("--prefix-cache-mib", "0")},
            **plan.fixed,  # type: ignore[arg-type]
        )
        deployment = stack.enter_context(Deployment(options))
        yield stack.enter_context(PacelineClient(deployment.gateway_endpoint)), links
