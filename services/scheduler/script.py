"""A Lua script of this package that Redis runs.

Deliberately does not know: what the script does. Called by services.scheduler.store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError


class Script:
    """A Lua script, run by its digest. The whole text is sent only to a server that does not know it."""

    def __init__(self, name: str) -> None:
        self._text = (resources.files(__package__) / name).read_text(encoding="utf-8")
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, keys: Sequence[str], arguments: Sequence[str]) -> Any:
        """Run the script.

        Returns:
            What the script returns.
        """
        try:
            return await client.evalsha(self._digest, len(keys), *keys, *arguments)
        except NoScriptError:
            return await client.eval(self._text, len(keys), *keys, *arguments)
