"""`paceline bench planner`: what choosing a step's draft nodes costs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.atomic_write import write_text

_GOAL_US = 100.0


def bench_planner(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures as JSON; - prints them.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 64,
    candidates: Annotated[int, typer.Option(min=1, help="Draft nodes of each sequence.")] = 16,
    rounds: Annotated[int, typer.Option(min=10, help="Choices that are timed.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the candidates' survivals.")] = 0,
) -> None:
    """Time the choice of draft nodes that the verifier makes before each step, on one core."""
    from experiments.bench.report import commit, processor
    from experiments.planner.measure import random_steps, time_choices
    from paceline import __version__

    steps = random_steps(sequences, candidates, seed)
    found = {
        "full search": time_choices(steps, rounds, is_rejection=False),
        "early stop": time_choices(steps, rounds, is_rejection=True),
    }
    slowest = max(found.values(), key=lambda timing: timing.median_us)
    report: dict[str, Any] = {
        "median_us": round(slowest.median_us, 2),
        "p90_us": round(slowest.quantile_us(0.9), 2),
        "sequences": sequences,
        "candidates": candidates,
        "rounds": rounds,
        "seed": seed,
        "modes": {
            name: {
                "median_us": round(timing.median_us, 2),
                "p10_us": round(timing.quantile_us(0.1), 2),
                "p90_us": round(timing.quantile_us(0.9), 2),
                "mean_nodes_chosen": round(timing.num_chosen, 1),
            }
            for name, timing in found.items()
        },
        "commit": commit(),
        "version": __version__,
        "command": " ".join(["paceline", *sys.argv[1:]]),
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
    }
    text = json.dumps(report, indent=2)
    if json_path == Path("-"):
        typer.echo(text)
        return
    console = Console()
    console.print(_table(report))
    verdict = "under" if report["median_us"] < _GOAL_US else "NOT under"
    console.print(f"slower of the two: {report['median_us']:.0f} us, {verdict} the goal of {_GOAL_US:.0f} us")
    if json_path is not None:
        write_text(json_path, text + "\n")
        console.print(f"wrote {json_path}")


def _table(report: dict[str, Any]) -> Table:
    rows = Table(
        title=f"one choice for {report['sequences']} sequences of {report['candidates']} candidates, "
        f"{report['rounds']} times"
    )
    for name in ("", "median", "10% to 90%", "nodes chosen"):
        rows.add_column(name, justify="right" if name else "left")
    for name, mode in report["modes"].items():
        rows.add_row(
            name,
            f"{mode['median_us']:.1f} us",
            f"{mode['p10_us']:.1f} to {mode['p90_us']:.1f} us",
            f"{mode['mean_nodes_chosen']:.1f}",
        )
    return rows
