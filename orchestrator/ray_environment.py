"""The environment that Ray reads when it is imported.

Responsible for: switching usage reports off and, for an embedded Ray, the priority of its workers and authentication.
Ray's control processes listen on every interface whatever address they are given (measured with Ray 2.60), and whoever
can talk to them can run code. So an embedded Ray gets token authentication, with a token that only this process and its
children have. By default Ray would write a token into the home directory. A cluster that is joined keeps the
authentication that its operator set up.

Must run before `import ray`, so orchestrator.__main__ calls it, and it imports nothing of Paceline.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping


def prepare_environment(environ: MutableMapping[str, str], *, is_embedded: bool) -> None:
    """Sets what Ray reads.

    Args:
        environ: the process environment.
        is_embedded: this process starts Ray; otherwise it joins a cluster.
    """
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if is_embedded:
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        environ.pop("RAY_AUTH_TOKEN_PATH", None)
        # By default Ray's workers have the priority of background work (niceness 15). Every commit and draft passes
        # through a conductor, so on busy cores each would wait for other processes.
        environ.setdefault("RAY_worker_niceness", "0")
