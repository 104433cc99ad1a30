"""`paceline bench-verification`: what rules of sampling, noise and decisions cost beside a step of the target."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.atomic_write import write_json

_GOAL = 0.05


def bench_verification(
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "verification.json"
    ),
    models: Annotated[
        str,
        typer.Option(help="Fetched models or directories, separated by commas; their vocabularies differ."),
    ] = "smollm2-135m,gemma3-270m",
    sequences: Annotated[str, typer.Option(help="Sequences in a step, separated by commas.")] = "1,4,16,64",
    draft_length: Annotated[int, typer.Option(min=0, help="Draft tokens of each sequence.")] = 4,
    num_right: Annotated[
        int | None,
        typer.Option(
            "--right", min=0, help="Of these the first that are right; all by default, the worst case."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Steps that are timed, for each number of sequences.")
    ] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="All cores that may be used by default.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Time verify_step beside the step whose logits it judges, in every mode."""
    from experiments.bench.report import commit, processor
    from experiments.verification.cases import Drafts
    from experiments.verification.measure import load_engine, measure, some_text
    from paceline import __version__
    from paceline.models import resolve
    from paceline.sampling import kernels

    console = Console()
    drafts = Drafts(draft_length, draft_length if num_right is None else min(num_right, draft_length))
    num_threads = threads or len(os.sched_getaffinity(0))
    report: dict[str, Any] = {
        "commit": commit(),
        "version": __version__,
        "command": " ".join(["paceline", *sys.argv[1:]]),
        "machine": f"{processor()}, {num_threads} threads",
        "dtype": dtype,
        "draft_length": draft_length,
        "num_right": drafts.num_right,
        "rounds": rounds,
        "sampling_kernels": kernels.load() is not None,
        "models": [],
    }
    with console.status("") as status:
        for model in models.split(","):
            engine, text = load_engine(resolve(model), dtype, num_threads), some_text(resolve(model))
            found = []
            for count in sequences.split(","):

                def progress(now: str, model: str = model) -> None:
                    status.update(f"{model}: {now}")

                found.append(measure(engine, text, int(count), drafts, rounds, progress))
            report["models"].append(
                {
                    "model": model,
                    "vocab_size": engine.shape.vocab_size,
                    "executor": type(engine.executor).__name__,
                    "batches": [
                        {
                            "sequences": one.num_sequences,
                            "rows": one.num_rows,
                            "step": one.step.summary(),
                            "verify": {
                                name: samples.summary()
                                | {
                                    "share": round(one.share(name), 4),
                                    "accepted": round(one.accepted[name], 2),
                                }
                                for name, samples in one.cases.items()
                            },
                        }
                        for one in found
                    ],
                }
            )
            del engine
    write_json(json_path, report)
    for model_report in report["models"]:
        for table in _tables(model_report):
            console.print(table)
    worst = max(
        (case["share"], name, batch["sequences"], one["model"])
        for one in report["models"]
        for batch in one["batches"]
        for name, case in batch["verify"].items()
    )
    verdict = "under" if worst[0] < _GOAL else "NOT under"
    share, name, count, model = worst
    console.print(
        f"largest share: {share:.1%} ({name}, {count} sequences, {model}), {verdict} the goal of {_GOAL:.0%}"
    )
    console.print(f"wrote {json_path}")


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    """Microseconds and shares for people: a table for each number of sequences."""
    for batch in report["batches"]:
        table = Table(
            title=f"{report['model']}: vocabulary {report['vocab_size']:,}, {report['executor']}; "
            f"{batch['sequences']} sequences",
            box=None,
            pad_edge=False,
            title_justify="left",
        )
        table.add_column("")
        for heading in ("median us (10% to 90%)", "share of step and verification"):
            table.add_column(heading, justify="right")
        table.add_row("step", _cell(batch["step"]), "")
        for name, case in batch["verify"].items():
            table.add_row(name, _cell(case), f"{case['share']:.1%}")
        yield table


def _cell(figures: dict[str, float]) -> str:
    return f"{figures['median_us']:,.0f} ({figures['p10_us']:,.0f} to {figures['p90_us']:,.0f})"
