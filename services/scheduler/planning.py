"""From measurements to a policy.

Responsible for: the planner's inputs, whether enough has been measured, the policy until then, and driving the
planner's state machine. Deliberately does not know: Redis, streams, versions.

Called by services.scheduler.registry at every planning interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from paceline.contract.policy import SpeculationPolicy
from paceline.methods.registry import METHODS
from paceline.scheduling import (
    DrafterPlacement,
    MeasuredHits,
    PlanInputs,
    PolicyMode,
    PolicyState,
    StepCurve,
    evaluate_policy,
)
from paceline.scheduling.speed import MeasuredSpeed, SpeedMeter, TimedPass
from services.scheduler.measurements import Measurements
from services.scheduler.subject import Subject

_MIN_PASSES = 32
_MIN_DRAFTS = 8
_MIN_ROUND_TRIPS = 4
_MIN_BUCKETS = 2  # a single point of the curve gives no slope
_MAX_EARLY = 512  # passes of a cold start that are kept for the first decision
_COLD_EXTRA_NODES = 2  # draft nodes beyond a chain during a cold start


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """Bounds that a deployment sets, and properties of its machines; `settings` describes each."""

    max_draft_length: int
    max_nodes_per_sequence: int
    max_nodes_per_step: int
    max_wait_s: float
    margin: float
    concurrent_slowdown: float
    max_outcomes: int
    outcome_cost: float
    cold_draft_length: int
    probe_interval_s: float
    probe_duration_s: float


class Planner:
    """Decides for one subject: feeds the state machine that keeps policies stable, and measures what they bring.

    Args:
        subject: what is planned for.
        limits: the deployment's bounds.
        clock: monotonic seconds.

    Attributes:
        measured_speed: what the policy in force brought; None while too few passes were made, or while it asks
            for no drafts.
    """

    def __init__(self, subject: Subject, limits: PlanningLimits, clock: Callable[[], float]) -> None:
        self._subject = subject
        self._limits = limits
        self.measured_speed: MeasuredSpeed | None = None
        self._meter = SpeedMeter()
        self._overlap_s = 0.0  # as last measured
        self._cold: SpeculationPolicy | None = None  # in force until enough is measured
        self._early: deque[TimedPass] = deque(maxlen=_MAX_EARLY)  # passes under the cold policy
        self._state = PolicyState(
            clock,
            probe_interval_s=limits.probe_interval_s,
            probe_duration_s=limits.probe_duration_s,
            probe_length=max(1, min(limits.cold_draft_length or 1, limits.max_draft_length)),
        )

    def decide(
        self,
        measurements: Measurements,
        num_sequences: int,
        passes: Iterable[TimedPass] = (),
        version: int = 0,
        *,
        longest_draft: int | None = None,
        round_fraction: float = 1.0,
    ) -> SpeculationPolicy:
        """The policy for now.

        Args:
            measurements: all measurements.
            num_sequences: sequences that one target runs; at least 1 is assumed.
            passes: timed passes since the last decision.
            version: published version of the policy in force.
            longest_draft: most tokens in a row of the drafter's drafts; None where positions alone bound them.
            round_fraction: sequences that are drafted for together, over those that one target runs.
        """
        max_length = min(self._limits.max_draft_length, longest_draft or self._limits.max_draft_length)
        if not self._subject.is_speculative:
            return self._decision(SpeculationPolicy.off(0, "off: there is no drafter"), num_sequences, 1.0)
        missing = self._missing(measurements)
        if missing:
            self._cold = self._cold_policy(missing, max_length)
            self._early.extend(passes)
            return self._decision(self._cold, num_sequences, 1.0)
        curve = measurements.curve.estimator()
        in_force, self._cold = self._cold or self._state.current, None
        has_waited = False
        for one in (*self._early, *passes):
            self._meter.add(one, curve.seconds)
            has_waited |= one.has_waited
        self._early.clear()
        speed = self.measured_speed = self._meter.measured(version) if in_force.draft_length else None
        num_sequences = max(1, num_sequences)
        num_together = max(1, round(num_sequences * round_fraction))
        inputs = self._inputs(measurements, curve, num_sequences, num_together, max_length, self._hits(speed))
        if has_waited and speed is not None and speed.wait_s is not None:
            self._learn_overlap(inputs, in_force, speed.wait_s)
        inputs = replace(inputs, overlap_s=self._overlap_s)
        is_own = in_force is self._state.current  # the state machine did not choose the cold policy
        policy = self._state.decide(inputs, self._verdict(speed, inputs) if is_own else None)
        expected = evaluate_policy(inputs, policy).speedup
        return self._decision(policy, num_sequences, expected)

    def _verdict(self, speed: MeasuredSpeed | None, inputs: PlanInputs) -> float | None:
        """The measured speed-up that the model is checked against: that of a probe, or one that is a loss."""
        if speed is None:
            return None
        believed = speed.believed(evaluate_policy(inputs, self._state.current).speedup)
        is_probe = self._state.mode is PolicyMode.PROBING
        return believed if is_probe or believed < 1 else None

    def _hits(self, speed: MeasuredSpeed | None) -> MeasuredHits | None:
        """How often outcomes had been drafted past, where the policy in force asks for that."""
        policy = self._state.current
        if speed is None or not policy.num_outcomes or not policy.draft_length:
            return None
        return MeasuredHits(speed.hit_rate, policy.draft_length, policy.num_outcomes)

    def _learn_overlap(self, inputs: PlanInputs, policy: SpeculationPolicy, wait_s: float) -> None:
        """Compare a wait that was measured under a policy with the model's wait; `inputs` has no overlap."""
        # With drafting ahead some waits cover only the rest of a draft, so they say nothing about the overlap.
        if policy.wait_budget_us and not policy.draft_ahead:
            self._overlap_s = max(0.0, inputs.wait_s(policy.draft_length) - wait_s)

    def _missing(self, measurements: Measurements) -> str:
        """The measurements that the planner still needs, for people; empty when it can decide."""
        needs = [
            ("step times", len(measurements.curve.buckets), _MIN_BUCKETS),
            ("verified drafts", measurements.acceptance.count, _MIN_PASSES),
            ("draft times", measurements.draft_time.count, _MIN_DRAFTS),
        ]
        if self._subject.placement == "separate":
            needs.append(("round trips", measurements.network.count, _MIN_ROUND_TRIPS))
        return ", ".join(f"{name} {have} of {need}" for name, have, need in needs if have < need)

    def _cold_policy(self, missing: str, max_length: int) -> SpeculationPolicy:
        """Draft a little, since acceptance is measured only on drafts; wait, since late drafts would always miss."""
        length = min(self._limits.cold_draft_length, max_length)
        reason = f"cold start, measured so far: {missing}"
        if length == 0:
            return SpeculationPolicy.off(0, reason)
        is_separate = self._subject.placement == "separate"
        wait_budget_us = int(self._limits.max_wait_s * 1e6) if is_separate else 0
        # A narrow tree: step times are flat over a few rows and then rise, and a curve that knows the steep
        # part alone makes the flat part look dear.
        budget = min(length + _COLD_EXTRA_NODES, self._limits.max_nodes_per_sequence)
        # Drafting ahead on a shared memory bus would make every step look slow.
        ahead = length if is_separate and not self._limits.concurrent_slowdown else 0
        return SpeculationPolicy(0, length, budget, wait_budget_us, ahead, reason)

    def _inputs(
        self,
        measurements: Measurements,
        curve: StepCurve,
        num_sequences: int,
        num_together: int,
        max_length: int,
        hits: MeasuredHits | None,
    ) -> PlanInputs:
        limits = self._limits
        method = METHODS.get(
            self._subject.method
        )  # None for a drafter that registered under a name of its own
        is_one_pass = method is not None and method.is_one_pass
        draft_model = measurements.draft_time.estimator(grows_with_length=not is_one_pass)
        round_trip, queue = measurements.network.estimator(), measurements.network.queue()

        # Hundreds of choices are evaluated, over a few dozen lengths.
        @cache
        def draft_time(num_tokens: int) -> float:
            steps = min(num_tokens, 1) if is_one_pass else num_tokens
            return draft_model.seconds(steps, num_together)

        @cache
        def speculation_cache_time(num_outcomes: int, num_tokens: int) -> float:
            return draft_time(num_tokens) * (1 + limits.outcome_cost * (num_outcomes - 1))

        return PlanInputs(
            placement=DrafterPlacement(self._subject.placement),
            acceptance=measurements.acceptance.estimator().rates(max_length),
            step_time=curve.seconds,
            draft_time=draft_time,
            rtt_s=round_trip.mean_s,
            rtt_p95_s=round_trip.p95_s,
            queue_s=queue.mean_s,
            concurrent_slowdown=limits.concurrent_slowdown,
            num_sequences=num_sequences,
            max_draft_length=max(1, min(max_length, limits.max_nodes_per_step // num_sequences)),
            max_nodes=limits.max_nodes_per_sequence,
            max_wait_s=limits.max_wait_s,
            margin=limits.margin,
            max_outcomes=0 if is_one_pass else limits.max_outcomes,
            speculation_cache_time=speculation_cache_time,
            ahead_fraction=1.0 if method is None else method.ahead_fraction,
            measured_hits=hits,
        )

    def _decision(
        self, policy: SpeculationPolicy, num_sequences: int, expected_speedup: float
    ) -> SpeculationPolicy:
        """The policy with the nodes of a whole step and the expected speed-up, within the limits of frames."""
        # A step's budget covers one sequence at least, and sequences that join later.
        # It grows by powers of two, so that the policy does not change with every sequence.
        num_covered = max(8, 1 << max(0, num_sequences - 1).bit_length())
        per_step = min(self._limits.max_nodes_per_step, policy.max_nodes_per_sequence * num_covered)
        complete = replace(policy, version=0, max_nodes_per_step=per_step, expected_speedup=expected_speedup)
        return complete.within_limits()
