"""Records step traces: a scheduler that decides nothing and writes down what conductors report to it.

Responsible for: taking reports under a policy that does not listen to them, and turning them into a trace. Step,
draft and network times and the number of sequences are those that were reported, frame by frame. Reports count
acceptances per position and name no single draft, so those are drawn at each frame's rates, from a seed; so is
which further choice would have been right, which nobody reports.

Deliberately does not know: deployments. Called by `python -m experiments.planner record`, whose port an
orchestrator is given as its scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.planner.trace import MAX_RIGHT, NO_SIBLING, Round, Trace, TraceInfo
from paceline.scheduling import DraftTimeModel, StepCurve
from paceline.v1 import scheduler_pb2, scheduler_pb2_grpc

_SIBLING = 0.4
_PRIOR = 2.0  # passes that a frame's rates are drawn towards those of the whole recording


@dataclass(frozen=True, slots=True)
class Frame:
    """One report and when it came in, in seconds from the first."""

    t_s: float
    report: scheduler_pb2.ReportRequest


class Recorder(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Keeps every report. What it publishes does not depend on them.

    Args:
        policy: in force for all who watch, but for its draft length: two lengths take turns, or nothing would tell a
            draft's fixed time from that of its tokens.
        clock: monotonic seconds.
        turn_s: how long each length lasts.
    """

    def __init__(
        self,
        policy: scheduler_pb2.SpeculationPolicy,
        clock: Callable[[], float] = time.monotonic,
        turn_s: float = 1.0,
    ) -> None:
        self.frames: list[Frame] = []
        self._policy = policy
        self._clock = clock
        self._turn_s = turn_s
        self._begun_s: float | None = None

    async def Report(
        self, request_iterator: AsyncIterator[scheduler_pb2.ReportRequest], context: Any
    ) -> scheduler_pb2.ReportResponse:
        """Takes in frames until the stream ends."""
        num_frames = 0
        async for report in request_iterator:
            now_s = self._clock()
            if self._begun_s is None:
                self._begun_s = now_s
            self.frames.append(Frame(now_s - self._begun_s, report))
            num_frames += 1
        return scheduler_pb2.ReportResponse(num_frames=num_frames)

    async def WatchPolicy(
        self, request: scheduler_pb2.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchPolicyResponse]:
        """The policy with its drafts and with drafts half as long, in turn, until the reader goes."""
        whole = self._policy.draft_length
        for version in itertools.count(1):
            policy = scheduler_pb2.SpeculationPolicy()
            policy.CopyFrom(self._policy)
            policy.version = version
            policy.draft_length = whole if version % 2 else max(1, whole // 2)
            # Chains both, or the shorter would be a tree, which takes longer than its depth says.
            policy.max_nodes_per_sequence = min(policy.max_nodes_per_sequence, policy.draft_length)
            yield scheduler_pb2.WatchPolicyResponse(policy=policy)
            await asyncio.sleep(self._turn_s)

    async def Snapshot(
        self, request: scheduler_pb2.SnapshotRequest, context: Any
    ) -> scheduler_pb2.SnapshotResponse:
        """The policy; what was measured is in the frames."""
        return scheduler_pb2.SnapshotResponse(policy=self._policy)


def trace_of(frames: Sequence[Frame], name: str, seed: int = 0) -> Trace:
    """A trace of what was reported.

    Args:
        frames: in the order in which they came in.
        name: of the trace.
        seed: of the draws (see the module's docstring).

    Raises:
        ValueError: no steps of two sizes, no drafts or no verified drafts were reported.
    """
    steps = [(s.num_rows, s.step_us) for f in frames for s in f.report.steps if s.step_us]
    drafts = [d for f in frames for d in f.report.drafts if d.draft_us]
    curve = StepCurve.fit((rows, step_us * 1e-6) for rows, step_us in steps)
    knots = sorted({rows for rows, _ in steps})
    if len(knots) < 2 or not drafts:
        raise ValueError("too little was reported: steps of two sizes and a draft are needed")
    base_us, token_us, path_us = _draft_times(drafts)
    placement = next((f.report.key.placement for f in frames if f.report.HasField("key")), "separate")
    info = TraceInfo(
        name=name,
        origin="recorded from a conductor's reports by experiments.planner.record; acceptances drawn at the reported "
        f"rates of each frame, seed {seed}",
        placement=placement,
        step_us=tuple((rows, round(curve(rows) * 1e6, 1)) for rows in knots),
        draft_base_us=round(base_us, 1),
        draft_token_us=round(token_us, 1),
        draft_path_us=round(path_us, 1),
    )
    overall = _rates([f.report for f in frames], (0.5,))
    period_s = max(1e-3, curve(knots[0]))
    rounds: list[Round] = []
    source, rtt_us = random.Random(seed), 0
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        report, end_s = frame.report, frame.t_s + 0.25 if following is None else following.t_s
        if not report.num_running_sequences or not report.steps:
            continue
        rates = _rates([report], overall)
        rtt_us = round(statistics.mean(report.round_trips_us)) if report.round_trips_us else rtt_us
        now_s, index = max(frame.t_s, rounds[-1].t_s + 1e-4 if rounds else 0.0), 0
        while now_s < end_s:
            step = report.steps[index % len(report.steps)]
            load = range(report.num_running_sequences)
            rounds.append(
                Round(
                    now_s,
                    tuple(_right(rates, source) for _ in load),
                    tuple(_sibling(source) for _ in load),
                    max(step.step_us, 1) * 1e-6 / curve(step.num_rows),
                    1.0,
                    (
                        report.round_trips_us[index % len(report.round_trips_us)]
                        if report.round_trips_us
                        else rtt_us
                    )
                    * 1e-6,
                )
            )
            now_s, index = now_s + period_s, index + 1
    return Trace(info, rounds)


def _draft_times(drafts: Sequence[scheduler_pb2.DraftSample]) -> tuple[float, float, float]:
    """Microseconds of a draft of any length, per token of it, and per token of each further path in the batch.

    A further path is taken to cost what a further sequence did; where none was ever drafted for, as much as the first.
    """
    found = DraftTimeModel.fit(
        (draft.num_draft_steps, draft.draft_us * 1e-6, draft.num_sequences) for draft in drafts
    ).coefficients
    num_tokens = statistics.mean(draft.num_draft_steps for draft in drafts)
    path_s = found.per_both_s + found.per_sequence_s / num_tokens
    if len({draft.num_sequences for draft in drafts}) < 2:
        path_s = found.per_token_s
    return found.base_s * 1e6, found.per_token_s * 1e6, path_s * 1e6


def _rates(reports: Sequence[scheduler_pb2.ReportRequest], prior: Sequence[float]) -> tuple[float, ...]:
    """Conditional acceptance per position, drawn towards `prior` where few drafts were verified."""
    length = max((len(report.drafted_per_position) for report in reports), default=0)
    drafted, accepted = ([0.0] * length, [0.0] * length)
    for report in reports:
        for counts, reported in (
            (drafted, report.drafted_per_position),
            (accepted, report.accepted_per_position),
        ):
            for position, count in enumerate(reported):
                counts[position] += count
    rates: list[float] = []
    for position in range(max(length, 1)):
        # Only those whose predecessors were accepted were tried.
        tried = 0.0
        if position < length:
            tried = min(drafted[position], accepted[position - 1] if position else drafted[0])
        guess = prior[min(position, len(prior) - 1)]
        hits = accepted[position] if position < length else 0.0
        rates.append(min(1.0, (hits + _PRIOR * guess) / (tried + _PRIOR)))
    return tuple(rates)


def _right(rates: Sequence[float], source: random.Random) -> int:
    count = 0
    while count < MAX_RIGHT and source.random() < rates[min(count, len(rates) - 1)]:
        count += 1
    return count


def _sibling(source: random.Random) -> int:
    choice = 1
    while choice < NO_SIBLING and source.random() > _SIBLING:
        choice += 1
    return choice
