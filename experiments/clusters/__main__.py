"""`python -m experiments.clusters`: a clustered head's cost and acceptance beside the dense one's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.atomic_write import write_json


def clusters(
    drafter: Annotated[Path, typer.Argument(help="Checkpoint of a trained gemma4_mtp.")],
    heldout: Annotated[Path, typer.Argument(help="Shards that it has not seen.")],
    model: Annotated[str, typer.Option(help="Name of a fetched model or a directory.")] = "gemma3-270m",
    selected: Annotated[str, typer.Option(help="Clusters scored, separated by commas.")] = "8,16,32,64,128",
    fit: Annotated[
        Path | None,
        typer.Option(help="Shards to fit clusters to that are made here; without, their means count."),
    ] = None,
    fit_rows: Annotated[int, typer.Option(min=1, help="Rows of them, of all steps in turn.")] = 6144,
    num_clusters: Annotated[int, typer.Option(min=1, help="Made here where the checkpoint has none.")] = 2048,
    rows: Annotated[str, typer.Option(help="Rows in a timed call, separated by commas.")] = "1,4,16",
    max_rows: Annotated[int, typer.Option(min=1, help="Chains compared at most.")] = 2000,
    batch_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Calls that are timed, of all heads in turn.")] = 30,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path(
        "clusters.json"
    ),
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Measure what a head in clusters saves, and what acceptance it keeps."""
    import torch

    from experiments.clusters import heads
    from paceline.models import resolve
    from paceline.target import configure_threads

    configure_threads(threads)
    assistant, tensors = heads.load(drafter, resolve(model), getattr(torch, dtype))
    held = heads.rows_of(assistant, heldout, batch_tokens, max_rows)
    seen = None
    if fit is not None:
        seen = heads.in_turn(heads.rows_of(assistant, fit, batch_tokens, fit_rows, greedy_only=False).states)
    figures = heads.compare(
        assistant, tensors, held, _numbers(selected), num_clusters, _numbers(rows), repeats, seen
    )
    report: dict[str, Any] = {
        "command": " ".join(["python -m experiments.clusters", *sys.argv[1:]]),
        "drafter": drafter.name,
        "dtype": dtype,
        "threads": threads,
        "num_chains": held.wanted.shape[1],
        "heads": [
            {
                "num_selected": one.num_selected,
                "mean_accepted": round(one.mean_accepted, 4),
                "agreement": round(one.agreement, 4),
                "us_by_rows": one.times,
            }
            for one in figures
        ],
    }
    write_json(json_path, report)
    typer.echo(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """A table: one head a line; microseconds of a call, median and quartiles."""
    sizes = list(report["heads"][0]["us_by_rows"])
    heads = [f"µs, {size} {'row' if size == 1 else 'rows'}" for size in sizes]
    lines = [
        "| head | accepted of 5 | as the dense one | " + " | ".join(heads) + " |",
        "| --- | ---: | ---: | " + " | ".join("---:" for _ in sizes) + " |",
    ]
    for one in report["heads"]:
        name = f"best {one['num_selected']} clusters" if one["num_selected"] else "dense"
        times = " | ".join(
            f"{time['median']:,.0f} ({time['p25']:,.0f} to {time['p75']:,.0f})"
            for time in one["us_by_rows"].values()
        )
        lines.append(f"| {name} | {one['mean_accepted']:.3f} | {one['agreement']:.1%} | {times} |")
    return "\n".join(lines)


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


if __name__ == "__main__":
    typer.run(clusters)
