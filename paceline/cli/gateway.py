"""The gateway that a command talks to: a running one, or one started for the command.

Responsible for: choosing it. Deliberately does not know: how a deployment is started (:mod:`paceline.cli.launch`), what
is generated. Called by ``paceline generate``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from paceline.client import PacelineClient, RetryPolicy
from paceline.contract.errors import InvalidRequestError, PacelineError
from paceline.embedded import record
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

    Raises:
        InvalidRequestError: several deployments run here, and `endpoint` does not choose one.
    """
    if endpoint is None:
        endpoint = _running_gateway()
    if endpoint is not None:
        yield endpoint
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


def _running_gateway() -> str | None:
    """The gateway that runs here: one of `paceline up`, or any at the default port; None if none answers."""
    recorded = {one.gateway: str(one) for one in record.running()}
    default = f"127.0.0.1:{FIRST_PORT}"
    candidates = {default: f"gateway {default}"} | recorded
    answering = [endpoint for endpoint in candidates if _answers(endpoint)]
    if len(answering) > 1:
        listed = "".join(f"\n  {candidates[endpoint]}" for endpoint in answering)
        raise InvalidRequestError(
            "endpoint", f"several deployments run here: pass --endpoint HOST:PORT{listed}"
        )
    return answering[0] if answering else None


def _answers(endpoint: str) -> bool:
    with PacelineClient(endpoint, retry=RetryPolicy(max_attempts=1)) as client:
        try:
            client.model_info(timeout_s=_PROBE_TIMEOUT_S)
        except PacelineError:
            return False
    return True
