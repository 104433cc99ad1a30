"""``paceline up``: everything on this machine until Ctrl-C.

Responsible for: printing what runs where, and restarting processes that end. Deliberately does not know: how
processes are started and stopped (:mod:`paceline.embedded`). Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import deployment_flags as flags
from paceline.cli.launch import running
from paceline.embedded import Deployment, Placement, Ports
from paceline.embedded.failure import DeploymentError, hint_for
from paceline.embedded.ports import FIRST_METRICS_PORT, FIRST_PORT
from paceline.embedded.record import recorded
from paceline.models import DEFAULT_MODEL

_POLL_S = 0.5
_MAX_RESTARTS = 3


def up(
    model: flags.Model = DEFAULT_MODEL,
    drafter: flags.Drafter = None,
    placement: flags.PlacementFlag = None,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "cpu",
    drafter_device: flags.DrafterDevice = "cpu",
    verifier_cores: flags.VerifierCores = None,
    drafter_cores: flags.DrafterCores = None,
    draft_length: flags.DraftLength = None,
    ngram_tokens: flags.NgramTokens = None,
    log_dir: flags.LogDir = None,
    start_timeout_s: flags.StartTimeout = 180.0,
    port: Annotated[
        int, typer.Option(help="Gateway's port; the others follow it.", min=1, max=65500)
    ] = FIRST_PORT,
    metrics_port: Annotated[
        int, typer.Option(help="Gateway's Prometheus port; the others follow it.", min=1, max=65500)
    ] = FIRST_METRICS_PORT,
) -> None:
    """Run Redis, Ray and every role on this machine until Ctrl-C."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    options = flags.read(
        console,
        model=model,
        drafter=drafter,
        placement=placement,
        dtype=dtype,
        device=device,
        drafter_device=drafter_device,
        verifier_cores=verifier_cores,
        drafter_cores=drafter_cores,
        draft_length=draft_length,
        ngram_tokens=ngram_tokens,
        log_dir=log_dir,
        start_timeout_s=start_timeout_s,
        ports=Ports.default(port, metrics_port),
    )
    with (
        running(options, console) as deployment,
        recorded(
            options.model.name,
            options.placement.value,
            deployment.gateway_endpoint,
            deployment.endpoint("scheduler"),
        ),
    ):
        _show(deployment, options.placement, console)
        _watch(deployment, console)


def _show(deployment: Deployment, placement: Placement, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("role", "pid", "address", "metrics"):
        table.add_column(heading)
    for role, pid in deployment.processes.items():
        is_server = role in deployment.ports.grpc
        address = deployment.endpoint(role) if is_server else ""
        table.add_row(role, str(pid), address, deployment.metrics_url(role) if is_server else "")
    console.print(table)
    console.print(
        f"placement {placement.value}; pinned: {'; '.join(deployment.plan.describe())}", markup=False
    )
    console.print(
        'try: paceline generate "Why is the sky blue?"   (Ctrl-C here ends everything)', markup=False
    )


def _watch(deployment: Deployment, console: Console) -> None:
    """Restarts processes that end, a few times each. Meanwhile text continues where possible."""
    num_restarts: dict[str, int] = {}
    while True:
        for role, code in deployment.dead().items():
            num_restarts[role] = num_restarts.get(role, 0) + 1
            lines = deployment.last_lines(role)
            console.print(f"{role} ended with code {code}", style="bold red", markup=False)
            if num_restarts[role] > _MAX_RESTARTS:
                for line in lines:
                    console.print(f"  {line}", style="dim", markup=False)
                console.print(f"what to do: {hint_for(lines, code)}", markup=False)
                raise typer.Exit(1)
            try:
                deployment.restart(role)
            except DeploymentError as error:
                console.print(f"{error}", style="red", markup=False)
            else:
                console.print(f"{role} runs again as {deployment.processes[role]}", markup=False)
        time.sleep(_POLL_S)
