"""Errors of deployments on one machine, with hints.

Responsible for: the errors, and what a user can do about each. Deliberately does not know: how processes run.
Raised by :mod:`paceline.embedded.deployment`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.contract.errors import UnavailableError

_HINTS = (
    (
        r"[Aa]ddress already in use|cannot listen",
        "another process uses the port: stop it, or choose other ports",
    ),
    (
        r"No module named '?(torch|transformers|ray|redis|jinja2|llguidance|tokenizers|prometheus_client|uvloop|"
        r"grpc_health)",
        "a package is missing: `pip install 'paceline[all]'`; `paceline doctor` lists what else is missing",
    ),
    (r"NotFetched|paceline models fetch", "the model is not here yet: `paceline models fetch smollm2-135m`"),
    (
        r"out of memory|Cannot allocate memory|bad_alloc",
        "memory ran out: close other programs or take a smaller model",
    ),
    (r"unknown setting|unrecognized arguments|usage:", "a setting is wrong: the line above names it"),
)


class DeploymentError(UnavailableError):
    """A process of the deployment did not start or ended by itself.

    Attributes:
        role: of the process.
        log_lines: the end of its log.
        hint: what to do.
    """

    reason = "DEPLOYMENT_FAILED"

    def __init__(
        self, role: str, what: str, log_lines: Sequence[str] = (), exit_code: int | None = None
    ) -> None:
        super().__init__(f"{role}: {what}")
        self.role = role
        self.log_lines = tuple(log_lines)
        self.hint = hint_for(log_lines, exit_code)


def hint_for(log_lines: Sequence[str], exit_code: int | None) -> str:
    """What to do about a process that ended with this log and exit code."""
    text = "\n".join(log_lines)
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return hint
    if exit_code == -9:
        return "the kernel killed it, probably because memory ran out"
    return "run `paceline doctor` to check this machine; see the log above"
