"""`paceline bench`: speed of plain, co-located and separate decoding, measured in one run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.distance.command import bench_distance
from experiments.overhead.command import bench_overhead
from experiments.planner.command import bench_planner
from paceline.atomic_write import write_json

bench = typer.Typer(add_completion=False, rich_markup_mode=None)
bench.command("planner")(bench_planner)
bench.command("distance")(bench_distance)
bench.command("overhead")(bench_overhead)


@bench.callback(invoke_without_command=True)
def compare(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "bench.json"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Where to write the picture; beside the figures by default.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Few prompts and tokens: about two minutes.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds over the prompts.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per round.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=8, help="Tokens per generation.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    draft_length: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    wait_budget_us: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    max_nodes: Annotated[
        int | None, typer.Option(min=0, help="Fixed; the policy decides by default.")
    ] = None,
    ngram_tokens: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Most tokens from a text's own repetitions; 8 by default."),
    ] = None,
) -> None:
    """Plain, co-located and separate decoding interleaved in one run, with transformers.generate beside them."""
    if context.invoked_subcommand is not None:
        return
    from experiments.bench.picture import draw
    from experiments.bench.prompts import embedded_prompts
    from experiments.bench.report import make_report, table
    from experiments.bench.runner import Plan, measure, same_text
    from paceline.methods.loading import default_drafter
    from paceline.models import resolve

    console = Console()
    started_s = time.monotonic()
    plan = Plan(
        model_dir=resolve(model),
        drafter_dir=drafter or default_drafter(model),
        dtype=dtype,
        prompts=embedded_prompts(prompts or (6 if quick else None)),
        max_tokens=max_tokens or (64 if quick else 128),
        rounds=rounds or (1 if quick else 3),
        num_cores=len(os.sched_getaffinity(0)),
        draft_length=draft_length,
        wait_budget_us=wait_budget_us,
        max_nodes=max_nodes,
        ngram_tokens=ngram_tokens,
    )
    with console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)

        measured = measure(plan, progress)
        identical = same_text(plan, 2 if quick else 6, 32, progress)
    command = " ".join(["paceline", *sys.argv[1:]])
    report = make_report(plan, measured, identical, command, time.monotonic() - started_s)
    write_json(json_path, report)
    drawn = picture or json_path.with_suffix(".png")
    draw(report, drawn)
    console.print(table(report))
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio['median']:.2f} times ({ratio['min']:.2f} to {ratio['max']:.2f})")
    console.print(
        f"same tokens in fp32: {report['identical']}; in {dtype}: {report['identical_fraction']:.0%} of generations"
    )
    console.print(f"wrote {json_path} and {drawn}")
