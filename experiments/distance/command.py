"""`paceline bench distance`: a separate drafter at several round trips, beside plain decoding."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.atomic_write import write_json


def bench_distance(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    round_trips: Annotated[
        str, typer.Option(help="Milliseconds that the link adds, separated by commas.")
    ] = "0,1,5,20,50",
    prompts: Annotated[int, typer.Option(min=1, help="Embedded prompts.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over the prompts at each distance.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per generation.")] = 128,
    warm_up: Annotated[int, typer.Option(min=0, help="Generations at each distance that do not count.")] = 2,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    ngram_tokens: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Most tokens from a text's own repetitions; 8 by default."),
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    wait_budget_us: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    draft_ahead: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    outcomes: Annotated[int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "distance.json"
    ),
) -> None:
    """Speed of a separate drafter behind an emulated link over plain decoding, in pairs; 1 where texts differ."""
    from experiments.bench.prompts import embedded_prompts
    from experiments.bench.report import commit, processor
    from experiments.distance.report import summarise, table
    from experiments.distance.runner import Plan, measure
    from paceline.methods.loading import default_drafter
    from paceline.models import resolve

    console = Console()
    started_s = time.monotonic()
    try:
        distances = [float(word) for word in round_trips.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"round trips are numbers separated by commas: {error}") from None
    fixed = {
        "ngram_tokens": ngram_tokens,
        "draft_length": draft_length,
        "wait_budget_us": wait_budget_us,
        "draft_ahead": draft_ahead,
        "num_outcomes": outcomes,
    }
    # The file's keys are older than the options' names, and scripts read them.
    keys = {"ngram_tokens": "lookup", "wait_budget_us": "hold_us", "num_outcomes": "outcomes"}
    plan = Plan(
        model_dir=resolve(model),
        drafter_dir=drafter or default_drafter(model),
        dtype=dtype,
        prompts=embedded_prompts(prompts),
        round_trips_ms=distances,
        max_tokens=max_tokens,
        rounds=rounds,
        cores=sorted(os.sched_getaffinity(0)),
        warm_up=warm_up,
        fixed=fixed,
    )
    with console.status("") as status:
        pairs = measure(plan, status.update)
    found = [summarise([pair for pair in pairs if pair.round_trip_ms == ms]) for ms in distances]
    report = {
        "distances": found,
        "model": plan.model_dir.name,
        "drafter": plan.drafter_dir.name,
        "dtype": dtype,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "prompts": [prompt.prompt_id for prompt in plan.prompts],
        "fixed": {keys.get(name, name): value for name, value in fixed.items()},
        "commit": commit(),
        "command": " ".join(["paceline", *sys.argv[1:]]),
        "machine": f"{processor()}, {len(plan.cores)} cores",
        "elapsed_s": round(time.monotonic() - started_s, 1),
    }
    write_json(json_path, report)
    console.print(table(found))
    if not all(one["identical"] for one in found):
        raise typer.Exit(1)
