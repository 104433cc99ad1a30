"""The drafter that a deployment was started with: whether it takes part.

Responsible for: asking the orchestrator until the drafter is connected and a policy for it is in force. Deliberately
does not know: processes. Called by the command line before it says that a deployment is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from paceline.embedded.options import Placement
from paceline.v1 import orchestrator_pb2, orchestrator_pb2_grpc

_POLL_S = 0.05
_CALL_TIMEOUT_S = 2.0


def wait_for_drafter(
    endpoint: str, placement: Placement, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
) -> str:
    """Waits until drafts can be expected.

    Args:
        endpoint: host:port of the orchestrator.
        placement: of the deployment; plain decoding has nothing to wait for.
        timeout_s: longest wait.
        is_cancelled: ends the wait early, such as when a process has ended.

    Returns:
        What is missing after the wait, as a sentence; empty if nothing is.
    """
    if placement is Placement.PLAIN:
        return ""
    deadline = time.monotonic() + timeout_s
    with grpc.insecure_channel(endpoint) as channel:
        stub = orchestrator_pb2_grpc.DirectorServiceStub(channel)
        while True:
            missing = _missing(stub, placement)
            if not missing or is_cancelled() or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S)


def _missing(stub: orchestrator_pb2_grpc.DirectorServiceStub, placement: Placement) -> str:
    try:
        found = stub.DescribeDeployment(orchestrator_pb2.DescribeDeploymentRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.RpcError:
        return "the orchestrator does not answer"
    if placement is Placement.SEPARATE and not found.drafters:
        return "the drafter is not connected: see the logs of drafter and orchestrator (--log-dir keeps them)"
    if found.placement != placement.value:
        return f"the verifier runs without its drafter (placement {found.placement}): see the verifier's log"
    if not found.has_policy:
        return "the scheduler has sent no policy for this drafter yet: see the scheduler's log"
    return ""
