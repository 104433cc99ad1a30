"""`python -m experiments.hop`: rounds through a conductor beside rounds over a direct stream, in turn."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from experiments.hop.rounds import CommittingVerifier, directly, through_conductor
from paceline.atomic_write import write_json

GRACE_S = 10.0


def hop(
    sequences: Annotated[str, typer.Option(help="Sequences together, separated by commas.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each kind and turn.")] = 200,
    turns: Annotated[int, typer.Option(min=1, help="Turns; the kinds take turns.")] = 3,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path("hop.json"),
) -> None:
    """From a commit at the verifier to its drafts there, the drafter taking no time of its own."""
    counts = [int(count) for count in sequences.split(",")]
    rows = uvloop.run(_measure(counts, rounds, turns))
    command = " ".join(["python -m experiments.hop", *sys.argv[1:]])
    write_json(json_path, {"command": command, "results": rows})
    typer.echo("| sequences | through a conductor, us | directly, us | the hop, us |\n|---:|---:|---:|---:|")
    for row in rows:
        typer.echo(
            f"| {row['sequences']} | {_cell(row['conductor'])} | {_cell(row['direct'])} | {row['hop_us']:.0f} |"
        )


async def _measure(counts: list[int], num_rounds: int, turns: int) -> list[dict[str, Any]]:
    rows = []
    for count in counts:
        through: list[float] = []
        direct: list[float] = []
        for _ in range(turns):
            with ExitStack() as stack:
                drafter = await _started(stack, "experiments.hop.drafter", "0")
                endpoint = f"127.0.0.1:{drafter}"
                verifier = CommittingVerifier()
                await verifier.start()
                try:
                    direct += await directly(verifier, endpoint, count, num_rounds)
                    verifier.lengths.clear()
                    conductor = await _started(
                        stack, "experiments.hop.conductor", f"127.0.0.1:{verifier.port}", endpoint
                    )
                    through += await through_conductor(verifier, conductor, count, num_rounds)
                finally:
                    await verifier.stop()
        row = {"sequences": count, "conductor": _summary(through), "direct": _summary(direct)}
        rows.append(row | {"hop_us": (statistics.median(through) - statistics.median(direct)) * 1e6})
    return rows


async def _started(stack: ExitStack, module: str, *arguments: str) -> str:
    """Starts a process and returns what it says once it is ready."""
    process = stack.enter_context(_process(module, *arguments))
    assert process.stdout is not None
    while line := await asyncio.to_thread(process.stdout.readline):
        if line.startswith("ready "):
            return line.removeprefix("ready ").strip()
    raise RuntimeError(f"{module} ended before it was ready")


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()  # what it waits for
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _summary(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10)
    return {
        "median_us": statistics.median(seconds) * 1e6,
        "p10_us": tenths[0] * 1e6,
        "p90_us": tenths[-1] * 1e6,
    }


def _cell(summary: dict[str, float]) -> str:
    return f"{summary['median_us']:.0f} ({summary['p10_us']:.0f} to {summary['p90_us']:.0f})"


if __name__ == "__main__":
    typer.run(hop)
