"""Replays policies on a step trace, and the planner that learns from what it sees there.

Responsible for: the steps of one target under a policy at virtual time, what the services would report of them, and the
best of many fixed policies in hindsight.

A step takes every sequence. One whose draft has arrived verifies what is left of it: tokens that plain steps have
committed meanwhile count as verified if they were right, and a draft that was overtaken and wrong is of no use. The
others take one plain row; with a hold, the step waits for them. While a step is made the drafter drafts past the
outcomes it holds likeliest, if the policy says so; where the outcome is among them the next draft is there as soon
as those paths are.

Deliberately does not know: single tokens, trees. Called by tests and by `python -m experiments.planner`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from experiments.planner.trace import Round, Trace
from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling.outcomes import likeliest_outcomes
from services.scheduler.measurements import (
    AcceptancePart,
    CurvePart,
    DraftTimePart,
    Measurements,
    NetworkPart,
)
from services.scheduler.planning import Planner, PlanningLimits
from services.scheduler.subject import Subject

# What a drafter believes of itself when it ranks outcomes; it need not be right.
_BELIEVED_ACCEPTANCE, _BELIEVED_SIBLING = (0.7,), 0.4


@dataclass(slots=True)
class Seen:
    """What the services measured since the planner last looked."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    round_trips_us: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """One path that was verified."""
        for counts, depth in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            for position in range(depth):
                counts[position] += 1

    def take(self, now_s: float) -> Measurements:
        """As the scheduler gets it; starts again from nothing."""
        taken = Measurements(
            CurvePart.of(self.steps, round(now_s * 1e3)),
            AcceptancePart.of(tuple(self.drafted), tuple(self.accepted)),
            DraftTimePart.of(self.drafts),
            NetworkPart.of(self.round_trips_us),
        )
        self.steps, self.drafts, self.round_trips_us = [], [], []
        self.drafted, self.accepted = [], []
        return taken


@dataclass(slots=True)
class _Draft:
    """One sequence's draft under way, or there."""

    length: int
    right: int
    sibling: int
    ready_s: float
    num_passed: int = 0

    @property
    def num_left(self) -> int:
        """Tokens worth verifying: none of a draft that plain steps overtook and proved wrong."""
        return max(0, self.length - self.num_passed) if self.right >= self.num_passed else 0


@dataclass(frozen=True, slots=True)
class Score:
    """Tokens committed in a time, and how many of its sequence-steps were hits."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds


Chooser = Callable[[float, int, Seen], SpeculationPolicy]
"""The policy at a time with that many sequences, given what was seen since it was last asked."""


def replay(trace: Trace, choose: Chooser, until_s: float | None = None) -> Score:
    """Run a trace from its start to its end (or to `until_s`) under whatever policy is chosen before each step."""
    end_s = trace.seconds if until_s is None else until_s
    is_colocated = trace.info.placement == "colocated"
    now_s, tokens, seen = 0.0, 0, Seen()
    drafts: list[_Draft | None] = []
    while now_s < end_s:
        round_ = trace.at(now_s)
        policy = choose(now_s, round_.num_sequences, seen)
        del drafts[round_.num_sequences :]
        drafts += [None] * (round_.num_sequences - len(drafts))
        if policy.wait_budget_us and not is_colocated:
            due_s = max((d.ready_s for d in drafts if d is not None), default=now_s)
            now_s = max(now_s, min(due_s, now_s + policy.wait_budget_us * 1e-6))
        verifying = [d.num_left if d is not None and d.ready_s <= now_s else 0 for d in drafts]
        rows = len(drafts) + sum(verifying)
        step_s = trace.step_s(rows) * round_.step_scale
        begun_s, now_s = now_s, now_s + step_s
        seen.steps.append((rows, max(1, round(step_s * 1e6))))
        owed: list[int] = []
        outcomes: dict[int, tuple[int, int]] = {}
        for which, (draft, num_verified) in enumerate(zip(drafts, verifying, strict=True)):
            tokens += 1
            if draft is None:
                owed.append(which)
                continue
            if draft.ready_s > begun_s:
                draft.num_passed += 1
                if draft.num_passed > draft.length or draft.right < draft.num_passed - 1:
                    owed.append(which)  # overtaken: the drafter hears of it and begins anew
                continue
            owed.append(which)
            if num_verified:
                num_accepted = min(draft.right - draft.num_passed, num_verified)
                tokens += num_accepted
                seen.verified(num_verified, num_accepted)
                is_first_choice = draft.right > draft.length
                outcomes[which] = (num_accepted, 0 if is_first_choice else draft.sibling)
        for which in owed:
            drafts[which] = None
        if policy.draft_length:
            now_s += _draft(trace, policy, drafts, owed, verifying, outcomes, begun_s, now_s, seen)
    return Score(tokens, now_s)


def _draft(
    trace: Trace,
    policy: SpeculationPolicy,
    drafts: list[_Draft | None],
    owed: Sequence[int],
    verifying: Sequence[int],
    outcomes: dict[int, tuple[int, int]],
    begun_s: float,
    ended_s: float,
    seen: Seen,
) -> float:
    """Begin the drafts that are owed after a step; returns the seconds that a drafter in turn took."""
    round_ = trace.at(ended_s)
    is_colocated = trace.info.placement == "colocated"
    rtt_s = 0.0 if is_colocated else round_.rtt_s
    hits: list[int] = []
    if policy.num_outcomes and policy.draft_ahead and outcomes:
        hits = [
            which
            for which, outcome in outcomes.items()
            if outcome in _drafted_past(verifying[which], policy.num_outcomes)
        ]
    missing = [which for which in owed if which not in hits and which < round_.num_sequences]
    draft_s = trace.draft_s(policy.draft_length, len(missing)) * round_.draft_scale
    past_s = trace.draft_s(policy.draft_ahead, len(outcomes) * policy.num_outcomes) * round_.draft_scale
    if missing:
        seen.drafts.append((policy.draft_length, round(draft_s * 1e6)))
        if not is_colocated:
            seen.round_trips_us.append(round(rtt_s * 1e6))
    for which in missing:
        drafts[which] = _fresh(round_, which, policy.draft_length, ended_s + draft_s + rtt_s)
    for which in hits:
        ready_s = max(ended_s, begun_s + past_s + rtt_s)
        if which < round_.num_sequences:
            drafts[which] = _fresh(round_, which, policy.draft_ahead, ready_s)
    return draft_s if is_colocated else 0.0


def _fresh(round_: Round, which: int, length: int, ready_s: float) -> _Draft:
    return _Draft(length, round_.right[which], round_.siblings[which], ready_s)


@functools.cache
def _drafted_past(length: int, num_acceptance_samples: int) -> frozenset[tuple[int, int]]:
    found = likeliest_outcomes(_BELIEVED_ACCEPTANCE, _BELIEVED_SIBLING, length, num_acceptance_samples)
    return frozenset((outcome.num_accepted, outcome.choice) for outcome in found)


def fixed(policy: SpeculationPolicy) -> Chooser:
    """Always the same policy."""
    return lambda now_s, num_sequences, seen: policy


def planned(trace: Trace, limits: PlanningLimits, interval_s: float = 0.5) -> Chooser:
    """The scheduler's own planner, which knows what was measured up to then and decides anew every `interval_s`."""
    now = [0.0]
    # A trace's drafts are accepted alike wherever they begin, as those of a drafter that reads tokens alone.
    subject = Subject("trace", "float32", "trace", "independent", trace.info.placement)
    planner = Planner(subject, limits, lambda: now[0])
    measurements, policy, due_s = Measurements(), SpeculationPolicy.off(0, "not begun"), 0.0

    def choose(now_s: float, num_sequences: int, seen: Seen) -> SpeculationPolicy:
        nonlocal measurements, policy, due_s
        if now_s >= due_s:
            due_s = now_s + interval_s
            now[0] = now_s
            measurements = measurements.merged(seen.take(now_s))
            policy = planner.decide(measurements, num_sequences)
        return policy

    return choose


def fixed_policies(
    placement: str, lengths: Iterable[int] = range(1, 9), outcomes: Iterable[int] = (2, 4, 8)
) -> list[SpeculationPolicy]:
    """Settings that somebody might have chosen once and for all, plain decoding first."""
    lengths = list(lengths)
    holds = (0,) if placement == "colocated" else (0, 50_000)
    found = [SpeculationPolicy.off(1, "plain")]
    for length in lengths:
        for wait_budget_us in holds:
            found.append(
                SpeculationPolicy(
                    1, length, length, wait_budget_us, 0, f"length {length}, hold {wait_budget_us}"
                )
            )
    if placement == "colocated":
        return found
    few = [length for length in lengths if length in (2, 4, 8)]
    for length in few:
        for wait_budget_us in holds:
            for count in outcomes:
                for ahead in few:
                    reason = f"length {length}, hold {wait_budget_us}, {ahead} past {count} outcomes"
                    found.append(SpeculationPolicy(1, length, length, wait_budget_us, ahead, reason, count))
    return found


def best_fixed(trace: Trace, policies: Iterable[SpeculationPolicy]) -> tuple[SpeculationPolicy, Score]:
    """The policy that would have been best for the whole trace, known only afterwards."""
    scored = [(policy, replay(trace, fixed(policy))) for policy in policies]
    return max(scored, key=lambda pair: pair[1].tokens_per_s)
