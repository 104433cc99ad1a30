"""Policies over time: hysteresis, a check against measured speed, and probes.

Responsible for: not alternating between lengths, turning speculation off where it does not pay, and probing it
again later.

Deliberately does not know: real time (the clock is passed in), estimators, transports.

Called by: the scheduler service. While the scheduler is unreachable, the last policy stays in force.

    state    leaves for  when
    on       off         expected, or measured, speedup below 1 + margin
    off      probing     the pause is over, see below
    off      on          expected speedup at least 1 + margin + hysteresis, unless a measurement turned it off
    probing  on          probe over, and expected speedup at least 1 + margin + hysteresis, unless measured otherwise
    probing  off         probe over otherwise, or measured as a loss before

A probe is made in the cheapest way that gives information. The cost of probes is bounded twice. First, the
expected loss of a probe must be paid for by the time since the last one. That loss is the model's or that of
the last measurement, whichever is larger: a model that a measurement refuted would take probes for free.
Second, pauses double with each probe in vain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from enum import StrEnum

from paceline.contract.policy import SpeculationPolicy
from paceline.scheduling.cycles import CostModel, Evaluation
from paceline.scheduling.inputs import DrafterPlacement, PlanInputs
from paceline.scheduling.planner import describe, evaluate, policy_of

_STICKINESS = 0.02  # another choice must be faster than the present one by this fraction
_MAX_DOUBLINGS = 4  # of the pause between two probes


class PolicyMode(StrEnum):
    """State of the policy: see the module's table."""

    ON = "on"
    OFF = "off"
    PROBING = "probing"


class PolicyState:
    """Turns a series of plan inputs into a series of policies that change only when it pays.

    Args:
        clock: monotonic seconds.
        hysteresis: extra expected speedup needed to turn on again.
        probe_interval_s: how long speculation stays off before its first probe.
        probe_duration_s: how long a probe lasts.
        probe_length: draft length of a probe.
        max_probe_loss: fraction of plain decoding's tokens that probes may cost. After a slow probe the next
            one waits longer.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        hysteresis: float = 0.05,
        probe_interval_s: float = 10.0,
        probe_duration_s: float = 1.0,
        probe_length: int = 4,
        max_probe_loss: float = 0.005,
    ) -> None:
        if hysteresis < 0 or min(probe_interval_s, probe_duration_s, max_probe_loss) <= 0 or probe_length < 1:
            raise ValueError("hysteresis must not be negative, probe settings must be positive")
        self._clock = clock
        self._hysteresis = hysteresis
        self._probe_interval_s = probe_interval_s
        self._probe_duration_s = probe_duration_s
        self._probe_length = probe_length
        self._max_probe_loss = max_probe_loss
        self._mode = PolicyMode.ON
        self._since = clock()
        # Whether a measurement contradicted the model; only another measurement can clear this.
        self._is_distrusted = False
        self._loss = 0.0  # fraction of plain decoding's tokens that speculation cost when last measured
        self._num_vain = 0  # periods of speculation and probes in a row that did not pay
        self._refuted = math.inf  # expected speed-up at the last of them
        self._evaluation: Evaluation | None = None
        self._probed: Evaluation | None = None
        self._current = SpeculationPolicy.off(0, "nothing planned yet")

    @property
    def current(self) -> SpeculationPolicy:
        """The policy in force."""
        return self._current

    @property
    def mode(self) -> PolicyMode:
        """The present state."""
        return self._mode

    def decide(self, inputs: PlanInputs, measured_speedup: float | None = None) -> SpeculationPolicy:
        """The policy for now.

        Args:
            inputs: present estimates.
            measured_speedup: measured tokens per second while speculating over those of plain decoding; None
                without a fresh measurement. Ignored while speculation is off.
        """
        best = evaluate(inputs)
        expected = best.speedup
        leave, enter = 1 + inputs.margin, 1 + inputs.margin + self._hysteresis
        elapsed_s = self._clock() - self._since
        if self._mode is PolicyMode.ON:
            if measured_speedup is not None and measured_speedup < leave:
                if elapsed_s >= self._pause_s:
                    self._num_vain = 0  # speculation has paid in between
                self._is_distrusted, self._loss = True, max(0.0, 1 - measured_speedup)
                self._note_vain(expected)
                return self._turn_off(f"off: measured speedup {measured_speedup:.3f} is below {leave:.3f}")
            if expected < leave:
                return self._turn_off(f"off: best speedup {expected:.3f} is below {leave:.3f}")
            return self._speculate(inputs, best)
        if self._mode is PolicyMode.PROBING:
            is_lost = measured_speedup is not None and measured_speedup < 1
            if elapsed_s < self._probe_duration_s and not is_lost:
                return self._current
            if measured_speedup is not None:
                self._judge_probe(inputs, measured_speedup, enter)
            if expected >= enter and not self._is_distrusted:
                self._switch(PolicyMode.ON)
                return self._speculate(inputs, best)
            self._note_vain(expected)
            return self._turn_off(f"off: probe done, best speedup {expected:.3f}, needed {enter:.3f}")
        if expected >= enter and not self._is_distrusted:
            self._switch(PolicyMode.ON)
            return self._speculate(inputs, best)
        if expected >= self._refuted + self._hysteresis:
            self._num_vain = 0  # the expectation has changed since it was refuted
        if elapsed_s >= self._pause_s and inputs.longest_draft > 0:
            probe = self._probed = self._probe(inputs, best)
            loss_s = self._probe_duration_s * max(self._loss, 1 - probe.speedup)
            if loss_s <= elapsed_s * self._max_probe_loss:
                self._switch(PolicyMode.PROBING)
                return self._publish(policy_of(inputs, probe, 0, f"probe: {describe(probe)}"))
        return self._current

    @property
    def _pause_s(self) -> float:
        """How long speculation stays off before it is probed again."""
        return self._probe_interval_s * float(1 << min(max(self._num_vain - 1, 0), _MAX_DOUBLINGS))

    def _judge_probe(self, inputs: PlanInputs, measured_speedup: float, enter: float) -> None:
        """Trust the model again where a probe paid, or brought as little as the model now predicts for it."""
        assert self._probed is not None, "a probe was made"
        predicted = CostModel(inputs).again(self._probed).speedup
        is_lost = measured_speedup < enter
        self._is_distrusted = is_lost and measured_speedup < predicted - self._hysteresis
        self._loss = max(0.0, 1 - measured_speedup) if is_lost else 0.0

    def _note_vain(self, expected: float) -> None:
        """Count a period or a probe of speculation that did not pay, as far as is known."""
        self._refuted = expected
        self._num_vain += 1

    def _probe(self, inputs: PlanInputs, best: Evaluation) -> Evaluation:
        """The choice to probe: the model's best, or else the cheapest way to a draft of the probe length."""
        length = min(self._probe_length, inputs.longest_draft)
        ways = (False, True) if inputs.placement is DrafterPlacement.SEPARATE else (False,)
        model = CostModel(inputs)
        probes = [model.chain(length, waits_for_drafts) for waits_for_drafts in ways]
        if best.draft_length:
            probes.append(best)
        return max(probes, key=lambda probe: probe.speedup)

    def _speculate(self, inputs: PlanInputs, best: Evaluation) -> SpeculationPolicy:
        """Publish the best choice, or keep the present one if it is nearly as good."""
        previous = self._evaluation
        if previous is not None and previous.draft_length:
            model = CostModel(inputs)
            kept = model.again(previous)
            if model.is_allowed(kept) and kept.tokens_per_s * (1 + _STICKINESS) >= best.tokens_per_s:
                best = kept
        self._evaluation = best
        return self._publish(policy_of(inputs, best, 0, describe(best)))

    def _turn_off(self, reason: str) -> SpeculationPolicy:
        self._switch(PolicyMode.OFF)
        self._evaluation = None
        return self._publish(SpeculationPolicy.off(0, reason))

    def _switch(self, mode: PolicyMode) -> None:
        self._mode = mode
        self._since = self._clock()

    def _publish(self, policy: SpeculationPolicy) -> SpeculationPolicy:
        """Put a policy in force. The version rises only when applying it changes something."""
        if self._current.version == 0 or policy.differs_from(self._current):
            self._current = dataclasses.replace(policy, version=self._current.version + 1)
        return self._current
