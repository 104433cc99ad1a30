"""``paceline version``. Responsible for: printing the version; called by :mod:`paceline.cli.app`."""

from __future__ import annotations

import typer

from paceline import PROTOCOL_VERSION, __version__


def version() -> None:
    """Print the version and the version of the wire protocol."""
    typer.echo(f"paceline {__version__} (protocol {PROTOCOL_VERSION})")
