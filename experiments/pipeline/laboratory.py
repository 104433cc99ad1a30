"""A deployment of real processes in which target, drafter and network are dials.

Responsible for: the tiny target, its script, the link, the deployment, and setting all of it while it runs.
Deliberately does not know: which points are of interest, or what to make of the figures. Used by
experiments.pipeline.measure.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.dials.dials import Dials
from experiments.dials.policy import FixedPolicy
from experiments.dials.script import Script, make_script, random_prompts
from experiments.dials.target import VOCAB_SIZE, write_target
from experiments.link.process import LinkProcess
from experiments.pipeline.cell import MAX_NODES, Cell, Shape
from experiments.pipeline.counts import Counts, read_counts
from experiments.pipeline.priority import raise_priority
from experiments.pipeline.sample import Sample
from paceline.atomic_write import write_json
from paceline.client import Chunk, Finished, PacelineClient
from paceline.embedded import Deployment, DeploymentOptions, Ports

NUM_PROMPT_TOKENS = 8
SETTLE_S = 0.3
"""From a change of the policy's file to its being in force everywhere: two polls and three hops, with room."""

LINK = "drafter"


class Laboratory:
    """See the module; made by `laboratory`.

    Attributes:
        directory: its files.
        script: the target's texts; the i-th of the sequences that run at once asks for the i-th.
    """

    def __init__(
        self,
        deployment: Deployment,
        client: PacelineClient,
        link: LinkProcess,
        script: Script,
        directory: Path,
    ) -> None:
        self.script = script
        self._deployment = deployment
        self._client = client
        self._link = link
        self.directory = directory
        self._version = 1
        self._shape: Shape | None = None

    def set(self, cell: Cell, shape: Shape, seed: int) -> None:
        """Puts a point and a cycle in force; returns when they are.

        Args:
            cell: all but its step curve, which is the verifier's for good.
            shape: of the cycle.
            seed: of the drafter's luck.
        """
        write_json(
            _dials_path(self.directory), Dials.from_dict({**cell.dials.as_dict(), "seed": seed}).as_dict()
        )
        self._link.set_round_trip(LINK, cell.round_trip_ms)
        if shape != self._shape:
            self._version += 1
            policy = shape.policy(self._version)
            write_json(_policy_path(self.directory), None if policy is None else policy.as_dict())
            self._shape = shape
            time.sleep(SETTLE_S)

    def counts(self) -> Counts:
        """Counters of verifier, drafter and link as they stand."""
        link = self._link.counters()[LINK]
        return read_counts(
            self._deployment.metrics_url("verifier"),
            self._deployment.metrics_url("drafter"),
            link.forward_bytes + link.back_bytes,
        )

    def generate(self, num_sequences: int, num_tokens: int, *, speculation: bool = True) -> list[Sample]:
        """So many sequences at once, begun together; one sample each.

        Raises:
            PacelineError: a generation failed.
        """
        start = threading.Barrier(num_sequences)

        def one(which: int) -> Sample:
            start.wait()
            return self._generate(which, num_tokens, speculation)

        with ThreadPoolExecutor(num_sequences, thread_name_prefix="sequence") as pool:
            return list(pool.map(one, range(num_sequences)))

    def _generate(self, which: int, num_tokens: int, speculation: bool) -> Sample:
        text = self.script.texts[which]
        arrivals: list[tuple[float, int]] = []
        tokens: list[int] = []
        num_passes = 0
        events = self._client.generate(
            text.prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, speculation=speculation
        )
        for event in events:
            if isinstance(event, Chunk) and event.token_ids:
                tokens += event.token_ids
                arrivals.append((time.perf_counter(), len(tokens)))
            elif isinstance(event, Finished):
                num_passes = event.stats.num_target_passes
        return Sample(
            arrivals=tuple(arrivals),
            num_passes=num_passes,
            is_identical=tuple(tokens) == text.continuation[:num_tokens],
        )


@contextmanager
def laboratory(
    step_curve: str, max_sequences: int, max_tokens: int, *, is_realtime: bool = False
) -> Iterator[Laboratory]:
    """A laboratory that is up while the context is held; nothing of it is left behind.

    Args:
        step_curve: as the verifier's flag takes it.
        max_sequences: most sequences at once.
        max_tokens: most tokens of a generation.
        is_realtime: gives its processes real-time priority.

    Raises:
        UnavailableError: real-time priority is not permitted.
        DeploymentError: a process did not start.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-laboratory-")))
        model = write_target(directory / "target")
        prompts = random_prompts(max_sequences, NUM_PROMPT_TOKENS, VOCAB_SIZE, seed=1)
        # Longer than any text, so that the drafter can always draft past its end.
        script = make_script(model, prompts, max_tokens + 2 * MAX_NODES)
        script.write(directory / "script.json")
        write_json(_dials_path(directory), Dials().as_dict())
        write_json(_policy_path(directory), FixedPolicy().as_dict())
        ports = Ports.free()
        link = stack.enter_context(LinkProcess({LINK: f"127.0.0.1:{ports.grpc['drafter']}"}))
        options = DeploymentOptions(
            model=model,
            drafter=directory / "script.json",
            dtype="float32",
            ngram_tokens=0,  # the dials alone say what is proposed
            ports=ports,
            log_level="warning",
            modules={
                "verifier": "experiments.dials.verifier_process",
                "drafter": "experiments.dials.drafter_process",
                "scheduler": "experiments.dials.policy_process",
            },
            endpoints={"drafter": link.endpoint(LINK)},
            extra_flags={
                "verifier": ("--step-curve", step_curve),
                "drafter": ("--dials", str(_dials_path(directory))),
                "scheduler": ("--policy", str(_policy_path(directory))),
            },
        )
        deployment = stack.enter_context(Deployment(options))
        client = stack.enter_context(PacelineClient(deployment.gateway_endpoint))
        if is_realtime:
            raise_priority([link.pid, *deployment.processes.values()])
        yield Laboratory(deployment, client, link, script, directory)


def _dials_path(directory: Path) -> Path:
    return directory / "dials.json"


def _policy_path(directory: Path) -> Path:
    return directory / "policy.json"
