"""`python -m experiments.pipeline`: cycles of speculation over acceptance, cost, round trip and load."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.atomic_write import write_json

MAX_SEQUENCES = 64


def pipeline(
    acceptance: Annotated[str, typer.Option(help="Chances that a draft token is right, by commas.")] = "0.8",
    cost: Annotated[str, typer.Option(help="Times of a draft token over a plain step, by commas.")] = "0.05",
    round_trips: Annotated[
        str, typer.Option(help="Conductor to drafter and back: ms, or plain steps as in 0.5T; by commas.")
    ] = "0,1,5,0.5T,20,50",
    sequences: Annotated[str, typer.Option(help="Sequences at once, by commas.")] = "1",
    cycles: Annotated[
        str,
        typer.Option(
            help="Of synchronous, ahead, enumerate, planned (as the scheduler decides); by commas. "
            "A draft length of its own stands behind a colon, as in synchronous:4."
        ),
    ] = "synchronous,ahead,enumerate",
    step_curve: Annotated[str, typer.Option(help="Step time: ms, or rows:ms as in 1:30,64:45.")] = "30",
    draft_length: Annotated[
        int | None, typer.Option(min=1, max=63, help="Of the synchronous cycle; the best by theory.")
    ] = None,
    ahead_length: Annotated[
        int | None, typer.Option(min=1, max=63, help="Of the pipelined cycles; the same.")
    ] = None,
    draft_ahead: Annotated[
        int | None, typer.Option(min=1, max=63, help="Tokens past the draft or each outcome.")
    ] = None,
    outcomes: Annotated[int, typer.Option(min=1, max=64, help="Outcomes drafted past.")] = 8,
    wait_budget_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=1000, help="Longest wait for a draft in pipelined cycles; ahead 0, enumerate 1000."
        ),
    ] = None,
    dials: Annotated[
        str, typer.Option(help="Further dials of the drafter as JSON, such as '{\"bonus_hit_rate\": 0.6}'.")
    ] = "{}",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all of it.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=32, max=1600, help="Tokens per generation.")] = 256,
    plain_tokens: Annotated[int, typer.Option(min=16, max=1600, help="The same for plain decoding.")] = 64,
    realtime: Annotated[
        bool, typer.Option(help="Real-time priority for its processes, where other work runs beside it.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the drafter's luck.")] = 0,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "pipeline.json"
    ),
    picture: Annotated[
        Path | None, typer.Option(help="Where to write the picture; beside the figures by default.")
    ] = None,
) -> None:
    """Measure cycles of speculation beside plain decoding, through real services whose speeds are dials."""
    from experiments.dials.dials import Dials
    from experiments.dials.step_clock import StretchCurve
    from experiments.pipeline.cell import Cell, parse_counts, parse_list, round_trips_ms
    from experiments.pipeline.laboratory import laboratory
    from experiments.pipeline.measure import Lengths, arms_of, figures_of, parse_cycles, run_rounds
    from experiments.pipeline.picture import draw
    from experiments.pipeline.report import make_report, tables

    console = Console()
    started_s = time.monotonic()
    try:
        curve = StretchCurve.parse(step_curve)
        counts = parse_counts(sequences, "sequences", MAX_SEQUENCES)
        further = json.loads(dials)
        cells = [
            Cell(
                dials=Dials.from_dict(
                    {"acceptance": a, "draft_ms": c * curve.step_s(count) * 1e3, **further}
                ),
                round_trip_ms=round_trip_ms,
                curve=curve,
                num_sequences=count,
            )
            for count in counts
            for a in parse_list(acceptance, "acceptance")
            for c in parse_list(cost, "cost")
            for round_trip_ms in round_trips_ms(round_trips.split(","), curve.step_s(count) * 1e3)
        ]
        lengths = Lengths(
            draft_length,
            ahead_length,
            draft_ahead,
            outcomes,
            None if wait_budget_ms is None else round(wait_budget_ms * 1e3),
        )
        arms = arms_of(cells, parse_cycles(cycles, lengths))
    except (ValueError, TypeError) as error:  # InvalidRequestError is a ValueError
        raise typer.BadParameter(str(error)) from None
    with (
        console.status("starting") as status,
        laboratory(step_curve, max(counts), max(max_tokens, plain_tokens), is_realtime=realtime) as up,
    ):
        run_rounds(
            up,
            arms,
            num_rounds=rounds,
            num_tokens=max_tokens,
            num_plain_tokens=plain_tokens,
            seed=seed,
            progress=lambda text: status.update(text),
        )
    report = make_report(
        figures_of(arms),
        {
            "step_curve": step_curve,
            "dials": further,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "plain_tokens": plain_tokens,
            "seed": seed,
            "realtime": realtime,
            "command": " ".join(["python -m experiments.pipeline", *sys.argv[1:]]),
            "elapsed_s": round(time.monotonic() - started_s, 1),
        },
    )
    write_json(json_path, report)
    drawn = picture or json_path.with_suffix(".png")
    draw(report, drawn)
    for table in tables(report):
        console.print(table)
    console.print(f"wrote {json_path} and {drawn}")
    if not all(arm["identical"] for arm in report["arms"]):
        console.print("[bold red]a text differs from plain decoding")
        raise typer.Exit(1)


def main() -> None:
    """Run it; a SIGTERM ends the laboratory in order, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    typer.run(pipeline)


if __name__ == "__main__":
    main()
