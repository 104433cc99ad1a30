"""`python -m experiments.planner`: generate step traces, and replay the planner on one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.planner.generate import write_all
from experiments.planner.replay import best_fixed, fixed, fixed_policies, planned, replay
from experiments.planner.trace import Trace
from paceline.scheduling import Policy
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


@app.command("replay")
def replay_trace(
    path: Annotated[Path, typer.Argument(exists=True, help="A trace.")],
    max_outcomes: Annotated[int, typer.Option(min=0, help="As in the scheduler's settings.")] = 8,
    outcome_cost: Annotated[float, typer.Option(min=0, max=1, help="As in the scheduler's settings.")] = 0.2,
) -> None:
    """Compare plain decoding, the planner, and the best of many fixed settings in hindsight."""
    trace = Trace.read(path)
    limits = default_limits(max_outcomes, outcome_cost)
    plain = replay(trace, fixed(Policy.off(1, "plain")))
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
