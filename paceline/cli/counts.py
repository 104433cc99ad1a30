"""The last line of a command about training data.

Deliberately does not know: what was counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import typer


def print_counts(counts: Mapping[str, int]) -> None:
    """One line: each count and its name."""
    typer.echo(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
