"""Command lines of the server processes.

Responsible for: which module runs a role, and its flags. Deliberately does not know: how processes are started.
The servers are other packages; this file knows their names and flags, and imports none of them. Called by
:mod:`paceline.embedded.deployment`.
"""

from __future__ import annotations

from pathlib import Path

from paceline.embedded.cores import CorePlan, format_cores
from paceline.embedded.options import DeploymentOptions, Placement
from paceline.embedded.ports import Ports

MODULES = {
    "scheduler": "services.scheduler",
    "verifier": "services.verifier",
    "drafter": "services.drafter",
    "orchestrator": "orchestrator",
    "gateway": "services.gateway",
}
_PLACEMENTS = {Placement.PLAIN: "none", Placement.COLOCATED: "colocated", Placement.SEPARATE: "separate"}

SHARED_MEMORY_SLOWDOWN = 0.3
"""The fraction by which a drafter at work slows down a target on another core of the same CPU.

Measured: passes of 15.3 ms, where 11.8 would be enough for their rows (SmolLM2-135M, two cores).
"""


def server_flags(
    role: str, options: DeploymentOptions, plan: CorePlan, ports: Ports, redis_url: str, ready_file: Path
) -> list[str]:
    """Flags of one server process."""
    return [
        *("--port", str(ports.grpc[role]), "--metrics-port", str(ports.metrics[role])),
        *(
            "--ready-file",
            str(ready_file),
            "--drain-s",
            str(options.drain_s),
            "--log-level",
            options.log_level,
        ),
        *_role_flags(role, options, plan, ports, redis_url),
        *options.extra_flags.get(role, ()),
    ]


def _role_flags(
    role: str, options: DeploymentOptions, plan: CorePlan, ports: Ports, redis_url: str
) -> list[str]:
    def address(of: str) -> str:
        return options.endpoints.get(of) or f"127.0.0.1:{ports.grpc[of]}"

    if role == "scheduler":
        flags = ["--redis-url", redis_url]
        if (
            options.placement is Placement.SEPARATE
            and options.verifier_device == options.drafter_device == "cpu"
        ):
            flags += ["--concurrent-slowdown", str(SHARED_MEMORY_SLOWDOWN)]
        return flags
    if role == "gateway":
        return ["--model", str(options.model), "--orchestrator", address("orchestrator")]
    if role == "verifier":
        flags = ["--model", str(options.model), "--device", options.verifier_device, "--dtype", options.dtype]
        flags += ["--threads", str(plan.verifier_threads), "--cores", format_cores(plan.verifier)]
        if options.placement is Placement.COLOCATED:
            flags += ["--drafter", str(options.drafter)]
        elif options.placement is Placement.SEPARATE and "drafter" not in options.modules:
            flags += ["--tap-from", str(options.drafter)]
        ngram_tokens = 0 if options.placement is Placement.PLAIN else options.ngram_tokens
        if ngram_tokens is not None:
            flags += ["--ngram-tokens", str(ngram_tokens)]
        return flags
    if role == "drafter":
        flags = ["--model", str(options.model), "--drafter", str(options.drafter)]
        flags += ["--device", options.drafter_device]
        return [*flags, "--threads", str(plan.drafter_threads), "--cores", format_cores(plan.drafter)]
    flags = ["--verifiers", address("verifier"), "--scheduler", address("scheduler")]
    flags += ["--placement", _PLACEMENTS[options.placement]]
    if options.placement is Placement.SEPARATE:
        flags += ["--drafters", address("drafter")]
    if "features" in options.endpoints:
        flags += ["--feature-endpoints", options.endpoints["features"]]
    for name in ("draft_length", "draft_ahead", "num_outcomes", "wait_budget_us", "max_nodes"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
