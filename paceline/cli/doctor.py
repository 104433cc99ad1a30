"""``paceline doctor``: what is missing on this machine and how to get it.

Responsible for: printing the findings, and the exit code. Deliberately does not know: what is checked
(:mod:`paceline.cli.checks`). Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.checks import run_checks

_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List what is missing on this machine and how to get it; exits with 1 if `paceline up` cannot work."""
    findings = run_checks()
    num_missing = sum(finding.state == "missing" for finding in findings)
    if as_json:
        typer.echo(
            json.dumps(
                {"ok": num_missing == 0, "checks": [asdict(finding) for finding in findings]}, indent=2
            )
        )
    else:
        console = Console(highlight=False, soft_wrap=True)
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            console.print(f"{finding.state:>7}", style=_STYLES[finding.state], end="  ")
            console.print(f"{finding.name:<{width}}  {finding.detail}", markup=False)
            if finding.fix:
                console.print(f"{'':>{width + 11}}-> {finding.fix}", markup=False)
        console.print("nothing is missing" if num_missing == 0 else f"{num_missing} missing")
    raise typer.Exit(0 if num_missing == 0 else 1)
