"""``paceline modes``: how drafts may be verified.

Responsible for: the list. Deliberately does not know: how any of them works. Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.sampling.params import VerifyMode


def modes(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the verification modes: whether they are exact, and what a drafter must send."""
    if as_json:
        rows = [{"name": mode.value, "exact": mode.is_exact, "needs": mode.needs} for mode in VerifyMode]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "exact", "a drafter sends", "use"):
        table.add_column(heading)
    for mode in VerifyMode:
        table.add_row(mode.value, "yes" if mode.is_exact else "no", mode.needs, _USE[mode])
    Console().print(table)


_USE = {
    VerifyMode.GREEDY: "temperature 0",
    VerifyMode.COUPLED: "the default above temperature 0: one text for a seed, whatever was drafted",
    VerifyMode.REJECTION: "most accepted tokens, on chains and trees",
    VerifyMode.BLOCK: "most accepted tokens of a chain",
    VerifyMode.TYPICAL: "only where another text than the target's will do",
}
