"""Laps of a step."""

from __future__ import annotations

from services.verifier.stopwatch import OVERHEAD, Stage, Stopwatch, overhead_s


def test_time_goes_to_the_stage_that_ends() -> None:
    now = iter([10.0, 11.0, 13.0, 16.0, 17.0, 20.0])
    watch = Stopwatch(lambda: next(now))
    watch.lap(Stage.COMMANDS)
    watch.lap(Stage.FORWARD)
    watch.lap(Stage.VERIFY)
    assert watch.lap(Stage.COMMANDS) == 17.0
    laps = watch.take()
    assert (laps[Stage.COMMANDS], laps[Stage.FORWARD], laps[Stage.VERIFY], laps[Stage.DRAFT_WAIT]) == (
        2,
        2,
        3,
        0,
    )
    assert overhead_s(laps) == 5
    assert sum(laps.values()) == 7
    watch.lap(Stage.IDLE)  # nothing is lost between two takes
    assert watch.take() == dict.fromkeys(Stage, 0.0) | {Stage.IDLE: 3.0}


def test_waits_passes_and_drafts_are_not_overhead() -> None:
    assert set(Stage) - set(OVERHEAD) == {Stage.IDLE, Stage.DRAFT_WAIT, Stage.FORWARD, Stage.DRAFT}
