"""``paceline methods``: the list of drafting methods. Called by :mod:`paceline.cli.app`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.methods.method import PLACEMENTS
from paceline.methods.registry import METHODS


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the drafting methods: what each reads, where it runs, its checkpoints, whether it can be trained."""
    rows = [row(name) for name in METHODS]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "trainable", "formats", "reads"):
        table.add_column(heading, no_wrap=heading == "name")
    for one in rows:
        table.add_row(one["name"], "yes" if one["trainable"] else "no", ", ".join(one["formats"]), one["tap"])
    console = Console()
    console.print(table)
    console.print(f"each may be placed {' or '.join(PLACEMENTS)}")


def row(name: str) -> dict[str, Any]:
    """Facts about a method that need no checkpoint."""
    method = METHODS[name]
    return {
        "name": name,
        "trainable": method.recipe is not None,
        "placements": list(PLACEMENTS),
        "formats": list(method.formats),
        "tap": method.reads,
    }
