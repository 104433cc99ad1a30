"""Runs the modes of the benchmark interleaved, so that the machine's drift falls on all of them alike.

Two deployments of real processes are up at once and idle between their turns: one with the drafter in the verifier's
process, one with verifier and drafter on a core each. Plain decoding is measured on the same verifiers
with speculation turned off for the request, which costs them nothing (the drafter is not asked).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench.baseline import TransformersBaseline
from experiments.bench.prompts import Prompt
from experiments.bench.sample import Sample
from paceline.client import Chunk, Finished, Message, PacelineClient, Stats
from paceline.embedded import Deployment, DeploymentOptions, Placement

SERVED_MODES = ("plain", "plain_one_core", "colocated", "separate")
# Nobody watches, as nobody watches the baseline; and each message costs time of cores that decode.
STREAM_INTERVAL = 32
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    model_dir: Path
    drafter_dir: Path
    dtype: str
    prompts: list[Prompt]
    max_tokens: int
    rounds: int
    num_cores: int
    draft_length: int | None = None
    wait_budget_us: int | None = None
    max_nodes: int | None = None
    ngram_tokens: int | None = None


@dataclass(slots=True)
class Measurements:
    """Samples by mode, in the order they were measured: the i-th of every mode is the same prompt and round."""

    by_mode: dict[str, list[Sample]] = field(default_factory=dict)
    method: str = ""

    def add(self, mode: str, sample: Sample) -> None:
        """Add one generation of a mode."""
        self.by_mode.setdefault(mode, []).append(sample)


def generate(client: PacelineClient, text: str, max_tokens: int, speculation: bool) -> Sample:
    """One chat turn through the gateway, greedily, timed at the client."""
    tokens: list[int] = []
    first_s: float | None = None
    stats: Stats | None = None
    started_s = time.perf_counter()
    turn: list[Message] = [{"role": "user", "content": text}]
    events = client.generate(
        turn,
        max_tokens=max_tokens,
        temperature=0.0,
        speculation=speculation,
        stream_interval=STREAM_INTERVAL,
    )
    for event in events:
        if isinstance(event, Chunk):
            first_s = first_s or time.perf_counter()
            tokens.extend(event.token_ids)
        elif isinstance(event, Finished):
            stats = event.stats
    ended_s = time.perf_counter()
    assert stats is not None, "a generation ends with its figures"
    return Sample(
        token_ids=tuple(tokens),
        elapsed_s=ended_s - started_s,
        ttft_s=(first_s or ended_s) - started_s,
        num_passes=stats.num_target_passes,
        drafted_per_position=stats.drafted_per_position,
        accepted_per_position=stats.accepted_per_position,
    )


@contextmanager
def serving(plan: Plan, dtype: str) -> Iterator[dict[str, tuple[PacelineClient, bool]]]:
    """Start both deployments; yields for each mode a client and whether it speculates."""
    cores = tuple(range(plan.num_cores))
    with ExitStack() as stack:

        def deploy(placement: Placement, **fixed: object) -> PacelineClient:
            options = DeploymentOptions(
                model=plan.model_dir,
                drafter=plan.drafter_dir,
                placement=placement,
                dtype=dtype,
                draft_length=plan.draft_length,
                wait_budget_us=plan.wait_budget_us,
                max_nodes=plan.max_nodes,
                ngram_tokens=plan.ngram_tokens,
                # Rounds repeat their prompts; each time they are to be run, as the yardstick runs them.
                extra_flags={"verifier": ("--prefix-cache-mib", "0")},
                **fixed,  # type: ignore[arg-type]
            )
            deployment = stack.enter_context(Deployment(options))
            return stack.enter_context(PacelineClient(deployment.gateway_endpoint))

        # All cores, divided as they always are: one of them for the processes that do not compute.
        together = deploy(Placement.COLOCATED)
        apart = deploy(Placement.SEPARATE, verifier_cores=cores[:1], drafter_cores=cores[1:2] or cores[:1])
        yield {
            "plain": (together, False),
            "plain_one_core": (apart, False),
            "colocated": (together, True),
            "separate": (apart, True),
        }


def measure(plan: Plan, progress: Progress) -> Measurements:
    """Speed of every mode in the benchmark's dtype."""
    results = Measurements()
    progress("loading transformers")
    baseline = TransformersBaseline(plan.model_dir, plan.dtype, plan.num_cores)
    progress("starting two deployments")
    with serving(plan, plan.dtype) as modes:
        results.method = modes["separate"][0].model_info().method
        progress("warming up")
        baseline.generate(plan.prompts[0].text, 8)
        for client, speculates in modes.values():
            for _ in range(2):
                generate(client, plan.prompts[0].text, plan.max_tokens, speculates)
        for round_index in range(plan.rounds):
            for prompt in plan.prompts:
                progress(f"round {round_index + 1} of {plan.rounds}: {prompt.prompt_id}")
                results.add("transformers", baseline.generate(prompt.text, plan.max_tokens))
                for mode, (client, speculates) in modes.items():
                    results.add(mode, generate(client, prompt.text, plan.max_tokens, speculates))
    return results


def same_text(plan: Plan, num_prompts: int, max_tokens: int, progress: Progress) -> bool:
    """Whether plain, co-located and separate give the same tokens in fp32, on the first prompts of the list."""
    progress("comparing texts in fp32")
    with serving(plan, "float32") as modes:
        for prompt in plan.prompts[:num_prompts]:
            texts = {
                mode: generate(client, prompt.text, max_tokens, speculates).token_ids
                for mode, (client, speculates) in modes.items()
            }
            if len(set(texts.values())) != 1:
                return False
    return True
