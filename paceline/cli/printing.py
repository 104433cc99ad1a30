"""Generated text and its stats on a terminal.

Responsible for: printing text as it arrives, choices as they end, and the lines after them. Deliberately does not know:
flags, where the gateway runs. Called by ``paceline generate``.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from paceline.cli.log_probs import log_prob_lines
from paceline.cli.stats import stats_line
from paceline.client import Chunk, Completion, Event, Finished, PacelineClient


def print_stats(completion: Completion) -> None:
    """Prints log-probabilities, if requested, and the line of stats."""
    for line in log_prob_lines(completion):
        typer.echo(line)
    typer.echo(stats_line(completion.stats, completion.finish_reason))
    if not completion.is_exact:
        typer.echo("this mode is not exact: the target alone would write another text", err=True)


def print_choices(
    client: PacelineClient, parameters: dict[str, Any], num_choices: int, *, quiet: bool
) -> None:
    """Prints each choice when it ends, since all of them are generated at the same time."""
    by_choice: dict[int, list[Event]] = {}
    for event in client.generate(**parameters, n=num_choices):
        by_choice.setdefault(event.index, []).append(event)
        if not isinstance(event, Finished):
            continue
        completion = Completion.from_events(by_choice.pop(event.index))
        if not quiet:
            typer.echo(f"choice {event.index}, seed {completion.seed}:")
        typer.echo(completion.text)
        if not quiet:
            print_stats(completion)


def print_stream(client: PacelineClient, parameters: dict[str, Any], *, speculation: bool) -> Completion:
    """Prints text as it arrives."""
    events = []
    for event in client.generate(**parameters, speculation=speculation):
        events.append(event)
        if isinstance(event, Chunk):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif isinstance(event, Finished):
            sys.stdout.write("\n")
    return Completion.from_events(events)
