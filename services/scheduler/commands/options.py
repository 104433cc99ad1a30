"""The options of `paceline curves` and `paceline policy`, and the reading and writing they share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.atomic_write import write_text
from paceline.contract.errors import UnavailableError
from services.runtime.tls import Tls
from services.scheduler.commands.sources import DEFAULT_REDIS, Known, read

Redis = Annotated[str | None, typer.Option(help="Read this Redis, such as redis://127.0.0.1:6379/0.")]
Scheduler = Annotated[
    str | None,
    typer.Option(
        help=f"Ask this scheduler, host:port; by default that of a running `paceline up`, else {DEFAULT_REDIS} is read."
    ),
]
Model = Annotated[str, typer.Option(help="Start of a model fingerprint; all models by default.")]
JsonPath = Annotated[
    str | None, typer.Option("--json", help="Write the stats to a file, or with - in place of the tables.")
]
Plot = Annotated[Path | None, typer.Option(help="Write a picture; the suffix chooses PNG or SVG.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM authorities, for a scheduler with TLS.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM client certificate for the scheduler.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of --tls-cert.")]


def known_subjects(
    redis: str | None,
    scheduler: str | None,
    model: str,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> list[Known]:
    """What is to be printed.

    Raises:
        UnavailableError: nothing has been measured.
    """
    known = read(redis, scheduler, model, Tls(ca=tls_ca, cert=tls_cert, key=tls_key))
    if not known:
        source = scheduler or redis or "the deployment here"
        what = f"of {model}... " if model else ""
        raise UnavailableError(f"{source} has no measurements {what}yet: they come with the first requests")
    return known


def write_json(values: Sequence[dict[str, Any]], path: str) -> None:
    """Write JSON to a file, or for ``-`` to standard output."""
    text = json.dumps(values, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_text(Path(path), text)
