"""The gateway that a command talks to: a running one, or one started for the command.

Responsible for: choosing it. Deliberately does not know: how a deployment is started (:mod:`paceline.cli.launch`), what
is generated. Called by ``paceline generate``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from paceline.client import PacelineClient, RetryPolicy
from paceline.contract.errors import PacelineError
from paceline.embedded.options import Placement
from paceline.embedded.ports import FIRST_PORT

_PROBE_TIMEOUT_S = 1.0


@contextlib.contextmanager
def gateway_for(
    endpoint: str | None,
    model: str,
    drafter: str | None,
    placement: Placement | None,
    dtype: str,
    console: Console,
) -> Iterator[str]:
    """Address of a gateway; if none runs, one is started for this block.

    Args:
        endpoint: host:port of a gateway; None takes the one of `paceline up`, if it runs.
        model, drafter, placement, dtype: of a deployment that is started for this block.
        console: for messages.
    """
    running_endpoint = f"127.0.0.1:{FIRST_PORT}"
    if endpoint is not None:
        yield endpoint
    elif _answers(running_endpoint):
        yield running_endpoint
    else:
        from paceline.cli import deployment_flags
        from paceline.cli.launch import running

        options = deployment_flags.read(
            console,
            model=model,
            drafter=drafter,
            placement=placement,
            dtype=dtype,
            device="cpu",
            drafter_device="cpu",
            verifier_cores=None,
            drafter_cores=None,
            draft_length=None,
            ngram_tokens=None,
            log_dir=None,
            start_timeout_s=180.0,
            ports=None,
        )
        console.print("no deployment runs here: starting one for this call (`paceline up` keeps one running)")
        with running(options, console) as deployment:
            console.print(f"pinned: {'; '.join(deployment.plan.describe())}", markup=False)
            yield deployment.gateway_endpoint


def _answers(endpoint: str) -> bool:
    with PacelineClient(endpoint, retry=RetryPolicy(max_attempts=1)) as client:
        try:
            client.model_info(timeout_s=_PROBE_TIMEOUT_S)
        except PacelineError:
            return False
    return True
