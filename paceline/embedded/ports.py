"""Ports of the processes on one machine.

Responsible for: the default ports and finding free ones. Deliberately does not know: what listens. Called by
:mod:`paceline.embedded.deployment` and the command line.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

ROLES = ("gateway", "verifier", "drafter", "scheduler", "orchestrator")
"""Roles in the order of their default ports."""

FIRST_PORT = 50050
FIRST_METRICS_PORT = 9100


@dataclass(frozen=True, slots=True)
class Ports:
    """A gRPC and a Prometheus port for every role, and one for Redis (0: any)."""

    grpc: dict[str, int]
    metrics: dict[str, int]
    redis: int = 0

    @classmethod
    def default(cls, first: int = FIRST_PORT, first_metrics: int = FIRST_METRICS_PORT) -> Ports:
        """Consecutive ports in the order of ``ROLES``."""
        return cls(
            grpc={role: first + index for index, role in enumerate(ROLES)},
            metrics={role: first_metrics + index for index, role in enumerate(ROLES)},
        )

    @classmethod
    def free(cls) -> Ports:
        """Ports that no process uses now."""
        with contextlib.ExitStack() as stack:  # all stay bound until the end, so that none is chosen twice
            numbers = [_bind_free(stack) for _ in range(2 * len(ROLES))]
        return cls(
            grpc=dict(zip(ROLES, numbers[: len(ROLES)], strict=True)),
            metrics=dict(zip(ROLES, numbers[len(ROLES) :], strict=True)),
        )

    def taken(self) -> list[tuple[str, int]]:
        """Role and number of each port that another process listens on."""
        numbered = [*self.grpc.items(), *((f"{role} metrics", port) for role, port in self.metrics.items())]
        if self.redis:
            numbered.append(("redis", self.redis))
        return [(role, port) for role, port in numbered if not is_free(port)]


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: closing connections do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _bind_free(stack: contextlib.ExitStack) -> int:
    probe = stack.enter_context(socket.socket())
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    return port
