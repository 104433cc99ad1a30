"""Options of a deployment on one machine.

Responsible for: the options and their defaults. Deliberately does not know: processes. Read by
:mod:`paceline.embedded.deployment`; created by the command line, tests and benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.contract.errors import InvalidRequestError
from paceline.embedded.ports import Ports


class Placement(StrEnum):
    """Where the drafter runs."""

    PLAIN = "plain"
    """Nowhere: plain decoding."""
    COLOCATED = "colocated"
    """In the verifier's process."""
    SEPARATE = "separate"
    """In a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """Options of one deployment.

    Attributes:
        model: directory of the target.
        drafter: directory of the drafter's checkpoint; not needed for plain decoding.
        placement: where the drafter runs.
        dtype: of the target; "auto" takes the fastest one that the device has.
        verifier_device: such as "cpu" or "cuda:0".
        drafter_device: the same for the drafter.
        verifier_cores: cores of the verifier; None lets :func:`paceline.embedded.cores.plan_cores` choose.
        verifier_threads: torch threads of the verifier; None takes one per core.
        drafter_cores: cores of the drafter's own process.
        drafter_threads: torch threads of the drafter.
        control_cores: cores of all processes that do not compute.
        draft_length: tokens per draft in place of the scheduler's choice.
        draft_ahead: tokens drafted ahead in place of the scheduler's choice.
        num_outcomes: outcomes of a step that are drafted past in place of the scheduler's choice.
        wait_budget_us: longest draft wait of a step in place of the scheduler's choice.
        max_nodes: draft nodes of one sequence in one step in place of the scheduler's choice.
        ngram_tokens: tokens that the verifier proposes from what a text repeats, in place of its default; plain: none.
        ports: None takes free ones.
        log_dir: keeps the logs there; None keeps them until the end only.
        log_level: of all processes.
        start_timeout_s: how long all processes together may take to be ready.
        drain_s: how long each may take to finish admitted work at the end.
        extra_flags: further command-line flags by role.
        modules: what is run for a role in place of its own module, such as an experiment's; it takes the role's flags.
            A drafter run so reads no features: what `drafter` names then need not be a checkpoint.
        endpoints: host:port at which a role is found by others, where that is not its own port: a proxy in front of it.
            "features" is the verifier as the drafter reaches it, for features alone.
    """

    model: Path
    drafter: Path | None = None
    placement: Placement = Placement.SEPARATE
    dtype: str = "auto"
    verifier_device: str = "cpu"
    drafter_device: str = "cpu"
    verifier_cores: tuple[int, ...] | None = None
    verifier_threads: int | None = None
    drafter_cores: tuple[int, ...] | None = None
    drafter_threads: int | None = None
    control_cores: tuple[int, ...] | None = None
    draft_length: int | None = None
    draft_ahead: int | None = None
    num_outcomes: int | None = None
    wait_budget_us: int | None = None
    max_nodes: int | None = None
    ngram_tokens: int | None = None
    ports: Ports | None = None
    log_dir: Path | None = None
    log_level: str = "info"
    start_timeout_s: float = 180.0
    drain_s: float = 5.0
    extra_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    endpoints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.placement is not Placement.PLAIN and self.drafter is None:
            raise InvalidRequestError("drafter", f"placement {self.placement} needs a drafter checkpoint")

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that run, in the order in which they start."""
        drafter = ("drafter",) if self.placement is Placement.SEPARATE else ()
        return ("redis", "scheduler", "verifier", *drafter, "orchestrator", "gateway")
