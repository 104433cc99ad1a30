"""`python -m experiments.link NAME=HOST:PORT ...`: links in a process of their own, told what to do by lines of JSON.

The first line on standard output names the port of each link: ``{"ports": {"drafter": 41234}}``. Each line on
standard input is answered by one line:

- ``{"link": "drafter", "forward": {"delay_ms": 2.5}, "back": {}}`` sets a link; forward is to the target.
- ``{}`` changes nothing.

The answer says how many bytes each link has handed on. The process ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from experiments.link.proxy import Link, precise_loop
from experiments.link.settings import LinkSettings
from paceline.contract.errors import InvalidRequestError


def answer(links: Mapping[str, Link], line: str) -> dict[str, Any]:
    """Carries out one line and says what there is to say; a bad line is answered with an error."""
    try:
        command = json.loads(line)
        if name := command.get("link"):
            if name not in links:
                raise InvalidRequestError("link", f"{name!r} is none of {', '.join(links)}")
            links[name].set(
                LinkSettings.from_dict(command.get("forward", {})),
                LinkSettings.from_dict(command.get("back", {})),
            )
    except (ValueError, TypeError, AttributeError) as error:  # InvalidRequestError is a ValueError
        return {"error": str(error)}
    return {"counters": {name: asdict(link.counters) for name, link in links.items()}}


def _parse(argument: str) -> tuple[str, tuple[str, int]]:
    name, _, target = argument.partition("=")
    host, _, port = target.rpartition(":")
    if not name or not host or not port.isdecimal():
        raise InvalidRequestError("link", f"expected NAME=HOST:PORT, got {argument!r}")
    return name, (host, int(port))


async def run(targets: Mapping[str, tuple[str, int]]) -> None:
    """Serves links until standard input ends."""
    loop = asyncio.get_running_loop()
    links = {name: Link(target, seed) for seed, (name, target) in enumerate(targets.items())}
    ports = {name: await link.start() for name, link in links.items()}
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, name="commands", daemon=True).start()
    _say({"ports": ports})
    while line := await lines.get():
        _say(answer(links, line))
    for link in links.values():
        await link.close()


def _say(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse the links and serve them."""
    try:
        targets = dict(map(_parse, sys.argv[1:]))
    except InvalidRequestError as error:
        sys.exit(str(error))
    if not targets:
        sys.exit((__doc__ or "").strip().splitlines()[0])
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(run(targets))


if __name__ == "__main__":
    main()
