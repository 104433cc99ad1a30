"""`python -m experiments.planner`: generate or record step traces, and replay the planner on one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from experiments.planner.generate import write_all
from experiments.planner.record import Recorder, trace_of
from experiments.planner.replay import best_fixed, fixed, fixed_policies, planned, replay
from experiments.planner.trace import Trace
from paceline.contract.policy import SpeculationPolicy
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.planning import PlanningLimits
from services.scheduler.settings import SchedulerSettings

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__)


@app.command("generate")
def generate_traces(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 1,
) -> None:
    """Write the seeded traces."""
    for path in write_all(folder, seed):
        typer.echo(f"{path} {path.stat().st_size / 1000:.0f} kB")


@app.command("record")
def record_trace(
    path: Annotated[Path, typer.Argument(help="Where to write the trace.")],
    port: Annotated[int, typer.Option(help="gRPC port; give it to an orchestrator as --scheduler.")] = 50063,
    seconds: Annotated[float, typer.Option(min=1, help="How long to listen.")] = 60.0,
    draft_length: Annotated[int, typer.Option(min=1, max=64, help="The longer of two lengths.")] = 8,
    wait_budget_us: Annotated[int, typer.Option(min=0, help="Longest hold of a step.")] = 50_000,
) -> None:
    """Stand in for a scheduler, and write down what conductors report; drafts of two lengths take turns."""
    policy = scheduler_pb2.SpeculationPolicy(
        version=1,
        draft_length=draft_length,
        max_nodes_per_sequence=draft_length,
        max_nodes_per_step=256,
        wait_budget_us=wait_budget_us,
        reason="recording",
    )
    recorder = Recorder(policy)

    async def listen() -> None:
        server = grpc.aio.server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(recorder, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await asyncio.sleep(seconds)
        await server.stop(0.5)

    asyncio.run(listen())
    trace = trace_of(recorder.frames, path.stem)
    trace.write(path)
    typer.echo(f"{path}: {len(trace.rounds)} rounds from {len(recorder.frames)} reports")


@app.command("replay")
def replay_trace(
    path: Annotated[Path, typer.Argument(exists=True, help="A trace.")],
    max_outcomes: Annotated[int, typer.Option(min=0, help="As in the scheduler's settings.")] = 8,
    outcome_cost: Annotated[float, typer.Option(min=0, max=1, help="As in the scheduler's settings.")] = 0.2,
) -> None:
    """Compare plain decoding, the planner, and the best of many fixed settings in hindsight."""
    trace = Trace.read(path)
    limits = default_limits(max_outcomes, outcome_cost)
    plain = replay(trace, fixed(SpeculationPolicy.off(1, "plain")))
    setting, best = best_fixed(trace, fixed_policies(trace.info.placement))
    ours = replay(trace, planned(trace, limits))
    rows = Table(title=f"{trace.info.name}: {trace.info.origin}; {trace.seconds:.0f} s")
    for name in ("", "tokens/s", "over plain"):
        rows.add_column(name, justify="right" if name else "left")
    for name, score in (("plain", plain), (f"best fixed ({setting.reason})", best), ("planner", ours)):
        rows.add_row(name, f"{score.tokens_per_s:.1f}", f"{score.tokens_per_s / plain.tokens_per_s:.3f}")
    Console().print(rows)


def default_limits(max_outcomes: int = 8, outcome_cost: float = 0.2) -> PlanningLimits:
    """The scheduler's defaults, but for what its settings leave to the deployment."""
    given = {"max_outcomes": max_outcomes, "outcome_cost": outcome_cost}
    return SchedulerSettings.model_validate(given).planning_limits


if __name__ == "__main__":
    app()
