"""What lies between two passes, from what a verifier says of itself."""

from __future__ import annotations

from prometheus_client import generate_latest
from typer.testing import CliRunner

from experiments.bench.command import bench
from experiments.overhead.command import table
from experiments.overhead.stages import parse_totals
from services.runtime import metrics
from services.verifier.stopwatch import OVERHEAD, StepStage


def test_stages_are_read_off_the_metrics_that_a_verifier_serves() -> None:
    before = parse_totals(generate_latest(metrics.REGISTRY).decode())
    for stage in StepStage:
        metrics.STEP_STAGE_SECONDS.labels("overhead-test", stage.value).inc(
            0.5 if stage is StepStage.FORWARD else 0.25
        )
    for _ in range(4):
        metrics.STEP_SECONDS.labels("overhead-test").observe(0.1)
    totals = parse_totals(generate_latest(metrics.REGISTRY).decode()).since(before)
    assert totals.num_steps == 4
    assert totals.ms_per_step(StepStage.FORWARD) == 125
    assert totals.overhead_ms == len(OVERHEAD) * 62.5


def test_a_round_is_a_line() -> None:
    row = {
        "sequences": 32, "speculation": True, "overhead_ms": 2.5, "share": 2.5 / 30, "forward_ms": 50.0,
        "stages_ms": {"schedule": 2.0, "report": 0.5},
    }  # fmt: skip
    cells = [list(column.cells) for column in table([row], 30.0).columns]
    assert [cell for (cell,) in cells] == ["32", "on", "2.50", "8.3%", "50.0", "schedule 2.00, report 0.50"]


def test_an_unknown_placement_is_refused_before_anything_starts() -> None:
    assert CliRunner().invoke(bench, ["overhead", "--placement", "nowhere"]).exit_code == 2
