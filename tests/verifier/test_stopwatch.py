"""Laps of a step."""

from __future__ import annotations

from services.verifier.stopwatch import OVERHEAD, StepStage, Stopwatch, overhead_s


def test_time_goes_to_the_stage_that_ends() -> None:
    now = iter([10.0, 11.0, 13.0, 16.0, 17.0, 20.0])
    watch = Stopwatch(lambda: next(now))
    watch.lap(StepStage.COMMANDS)
    watch.lap(StepStage.FORWARD)
    watch.lap(StepStage.VERIFY)
    assert watch.lap(StepStage.COMMANDS) == 17.0
    laps = watch.take()
    assert (
        laps[StepStage.COMMANDS],
        laps[StepStage.FORWARD],
        laps[StepStage.VERIFY],
        laps[StepStage.DRAFT_WAIT],
    ) == (
        2,
        2,
        3,
        0,
    )
    assert overhead_s(laps) == 5
    assert sum(laps.values()) == 7
    watch.lap(StepStage.IDLE)  # nothing is lost between two takes
    assert watch.take() == dict.fromkeys(StepStage, 0.0) | {StepStage.IDLE: 3.0}


def test_waits_passes_and_drafts_are_not_overhead() -> None:
    assert set(StepStage) - set(OVERHEAD) == {
        StepStage.IDLE,
        StepStage.DRAFT_WAIT,
        StepStage.FORWARD,
        StepStage.DRAFT,
    }
