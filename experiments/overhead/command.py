"""`paceline bench overhead`: what a step costs beside the target's forward pass, by stage and load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.atomic_write import write_json

if TYPE_CHECKING:
    from experiments.overhead.stages import Totals


def bench_overhead(
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    placement: Annotated[str, typer.Option(help="colocated or separate.")] = "colocated",
    sequences: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,32",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at each of them; the first is not counted.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per generation.")] = 96,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Step that shares are of, milliseconds.")] = 30.0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "overhead.json"
    ),
) -> None:
    """Time between two passes of the target, waits and drafts left out, with speculation and without."""
    from experiments.bench.prompts import embedded_prompts
    from experiments.bench.report import commit, processor
    from experiments.bench.runner import generate
    from experiments.overhead.stages import read_totals
    from paceline.client import PacelineClient
    from paceline.embedded import Deployment, DeploymentOptions, Placement
    from paceline.methods.loading import default_drafter
    from paceline.models import resolve

    console = Console()
    try:
        loads = [int(word) for word in sequences.split(",")]
        where = Placement(placement)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    prompts = embedded_prompts()
    options = DeploymentOptions(
        model=resolve(model), drafter=drafter or default_drafter(model), placement=where, dtype=dtype
    )
    rows: list[dict[str, Any]] = []
    with (
        console.status("starting") as status,
        Deployment(options) as deployment,
        PacelineClient(deployment.gateway_endpoint) as client,
        ThreadPoolExecutor(max(loads)) as pool,
    ):

        def run(load: int, speculation: bool) -> Totals:
            before = read_totals(deployment.metrics_url("verifier"))
            texts = [prompts[i % len(prompts)].text for i in range(load)]
            list(pool.map(lambda text: generate(client, text, max_tokens, speculation), texts))
            return read_totals(deployment.metrics_url("verifier")).since(before)

        for load in loads:
            for speculation in (False, True):
                status.update(f"{load} at once, speculation {'on' if speculation else 'off'}")
                run(load, speculation)
                rows += [_row(load, speculation, run(load, speculation), step_ms) for _ in range(rounds - 1)]
    report = {
        "rows": rows,
        "step_ms": step_ms,
        "model": options.model.name,
        "placement": where.value,
        "dtype": dtype,
        "commit": commit(),
        "command": " ".join(["paceline", *sys.argv[1:]]),
        "machine": processor(),
    }
    write_json(json_path, report)
    console.print(table(rows, step_ms))


def _row(load: int, speculation: bool, totals: Totals, step_ms: float) -> dict[str, Any]:
    from services.verifier.stopwatch import OVERHEAD, StepStage

    return {
        "sequences": load,
        "speculation": speculation,
        "num_steps": round(totals.num_steps),
        "tokens_accepted_per_step": round(totals.num_accepted / max(totals.num_steps, 1.0), 3),
        "overhead_ms": round(totals.overhead_ms, 3),
        "share": round(totals.overhead_ms / step_ms, 4),
        "forward_ms": round(totals.ms_per_step(StepStage.FORWARD), 3),
        "stages_ms": {stage.value: round(totals.ms_per_step(stage), 3) for stage in OVERHEAD},
    }


def table(rows: Sequence[dict[str, Any]], step_ms: float) -> Table:
    """One line a round."""
    found = Table(title=f"between two passes, ms a step; shares are of {step_ms:g} ms")
    for heading in ("sequences", "drafts", "overhead", "share", "forward", "of it"):
        found.add_column(heading, justify="left" if heading == "of it" else "right")
    for row in rows:
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in row["stages_ms"].items())
        found.add_row(
            str(row["sequences"]),
            "on" if row["speculation"] else "off",
            f"{row['overhead_ms']:.2f}",
            f"{row['share']:.1%}",
            f"{row['forward_ms']:.1f}",
            parts,
        )
    return found
