"""The environment that Ray reads when it is imported.

Responsible for: switching usage reports off, and for a Ray of our own, the priority of its workers and its protection.
Its control processes listen on every interface whatever address they are given (measured with Ray 2.60), and whoever
may talk to them may run code, so it gets token authentication with a token that lives in this process and its children
only. Left alone, Ray would write a token into the home directory. A cluster that is joined keeps the authentication
that its operator set up.

Must run before `import ray`, so it is called by orchestrator.__main__ and imports nothing of ours.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping


def prepare_environment(environ: MutableMapping[str, str], *, is_embedded: bool) -> None:
    """Sets what Ray reads.

    Args:
        environ: the process environment.
        is_embedded: a Ray is started here; otherwise one is joined.
    """
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if is_embedded:
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        environ.pop("RAY_AUTH_TOKEN_PATH", None)
        # Ray starts its workers at the priority of background work, 15 levels down. Every commit and draft passes
        # through a conductor, so on busy cores each would wait for whatever else wants to run.
        environ.setdefault("RAY_worker_niceness", "0")
