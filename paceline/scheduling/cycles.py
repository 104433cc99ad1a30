"""The cost model: what a speculation cycle commits and how long it takes, for each way to run it.

Responsible for: expected tokens per second of one choice of length, waiting and verification outcomes drafted
past.

Deliberately does not know: which choice is best (`planner`), estimators, clocks, single tokens (`budget`).

Called by: `planner`, `state`, the scheduler service, the simulator.

With n sequences, E(k) = 1 + sum of the first k path acceptances, T(rows) the step time and D(k) the draft time:

    co-located          n E(k) / (T(n (1 + k)) + D(k))
    separate, waiting   n E(k) / (T(n (1 + k)) + wait),  wait = D(k) + RTT + queue - overlap
    separate, running   The verifier makes m = ceil(wait / T(n)) plain steps while the draft is on its way. The first m
                        drafted tokens are then committed already; with probability path acceptance(m) they were right:
                        n (m + 1 + sum of path acceptances m+1..k) / ((1 + s) (m T(n) + T(n (1 + k - m)))),
                        where s is the fraction by which a drafter at work slows a step down.
    speculation cache   During a step the drafter drafts k tokens past each of its W likeliest outcomes, in time
                        D'(W, k). With probability h(W) the outcome is among them (a hit). Then the next step verifies
                        that path at once if queue + D'(W, k) + RTT <= T. Otherwise it waits for the rest, or runs
                        without. After a miss a draft of g tokens is made from the committed text, and the verifier
                        waits or runs as above. A hit is more likely after a step that verified few tokens, so steps
                        after hits and steps after misses are two states of a chain. A step that waits does so as soon
                        as one of its sequences missed. For one sequence and g = k the speed is
                        E / (h max(T, queue + D' + RTT) + (1 - h) (T + wait))  (SSD, arXiv 2603.03251; the closed form
                        is in experiments.theory.outcomes). After a hit a drafter of features has drafted on its own
                        outputs, so that only a fraction of the accepted tokens remains (`ahead_fraction`).

A longer round trip makes the best length of "running" longer. More load makes each best length shorter.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from paceline.scheduling.inputs import DrafterPlacement, PlanInputs


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A way to speculate and what it is expected to bring.

    Attributes:
        draft_length: tokens per draft; 0 is plain decoding.
        waits_for_drafts: whether the verifier waits for a draft that has not arrived (separate placement only).
        wait_budget_s: how long the verifier may wait.
        tokens_per_s: of all sequences together.
        speedup: over plain decoding under the same load.
        num_outcomes: verification outcomes of a step that are drafted past during the step; 0 for none.
        draft_ahead: tokens drafted past each of them.
        hit_rate: fraction of steps whose outcome is among them.
        wait_s: mean wait of a step in the state that waits longest, without the overlap measured today.
    """

    draft_length: int
    waits_for_drafts: bool
    wait_budget_s: float
    tokens_per_s: float
    speedup: float
    num_outcomes: int = 0
    draft_ahead: int = 0
    hit_rate: float = 0.0
    wait_s: float = 0.0

    @property
    def uses_speculation_cache(self) -> bool:
        """Whether outcomes are drafted past."""
        return self.num_outcomes > 0


class CostModel:
    """Evaluates choices under one set of inputs. What the choices have in common is computed once."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self._plain_s = inputs.step_time(inputs.num_sequences)
        self._gains = [0.0]  # of the first k draft tokens
        self._steps: dict[int, float] = {}
        self._hits: dict[int, tuple[float, ...]] = {}

    def plain(self) -> Evaluation:
        """Plain decoding: nothing is drafted, no step waits."""
        return self._evaluation(0, False, 1.0, self._plain_s)

    def chain(self, length: int, waits_for_drafts: bool) -> Evaluation:
        """Drafts of one length that are requested when a step has ended."""
        if length == 0:
            return self.plain()
        inputs = self.inputs
        if inputs.placement is DrafterPlacement.COLOCATED:
            seconds = self._step_s(length) + inputs.draft_time(length)
            return self._evaluation(length, False, 1.0 + self._gain(length), seconds)
        tokens, seconds = self._arriving(length, inputs.wait_s(length), waits_for_drafts)
        if not waits_for_drafts:
            return self._evaluation(length, False, tokens, seconds * (1 + inputs.concurrent_slowdown))
        # The overlap may disappear, and a wait that ends too early costs both the wait and the draft.
        wait_s = inputs.whole_wait_s(length)
        return self._evaluation(length, True, tokens, seconds, self._wait_budget_s(wait_s), wait_s=wait_s)

    def cached(self, length: int, waits_for_drafts: bool, outcomes: int, ahead: int) -> Evaluation:
        """Paths of ``ahead`` tokens past outcomes, drafted during each step; drafts of ``length`` tokens after a
        miss.

        Args:
            length: tokens of a draft after a miss. At least 1.
            waits_for_drafts: whether steps wait for drafts that are late.
            outcomes: outcomes that are drafted past. At least 1.
            ahead: tokens past each. At least 1.
        """
        inputs = self.inputs
        slow = 1 + inputs.concurrent_slowdown
        build_s = inputs.queue_s + inputs.speculation_cache_s(outcomes, ahead)
        after_hit, after_miss = self._hit_rate(ahead, outcomes), self._hit_rate(length, outcomes)
        leaving = 1 - after_hit + after_miss
        fraction_after_hit = after_miss / leaving if leaving > 0 else 0.0
        miss_wait_s = inputs.wait_s(length)
        miss_tokens, miss_s = self._arriving(length, miss_wait_s, waits_for_drafts, slow)
        tokens = seconds = longest_late_s = 0.0
        for fraction, hit_rate, verified in (
            (fraction_after_hit, after_hit, ahead),
            (1 - fraction_after_hit, after_miss, length),
        ):
            late_s = max(0.0, build_s + inputs.rtt_s - self._step_s(verified) * slow)
            hit_tokens, hit_s = self._arriving(ahead, late_s, waits_for_drafts, slow, inputs.ahead_fraction)
            tokens += fraction * (hit_rate * hit_tokens + (1 - hit_rate) * miss_tokens)
            seconds += fraction * (hit_rate * hit_s + (1 - hit_rate) * miss_s)
            if waits_for_drafts and inputs.num_sequences > 1:
                seconds += fraction * self._waiting_for_others_s(hit_rate, late_s, miss_wait_s)
            longest_late_s = max(longest_late_s, late_s)
        wait_s = max(longest_late_s, inputs.whole_wait_s(length))
        return self._evaluation(
            length,
            waits_for_drafts,
            tokens,
            seconds,
            self._wait_budget_s(wait_s) if waits_for_drafts else 0.0,
            outcomes,
            ahead,
            fraction_after_hit * after_hit + (1 - fraction_after_hit) * after_miss,
            wait_s if waits_for_drafts else 0.0,
        )

    def again(self, evaluation: Evaluation) -> Evaluation:
        """The same choice under these inputs."""
        length, waits_for_drafts = evaluation.draft_length, evaluation.waits_for_drafts
        if evaluation.uses_speculation_cache:
            return self.cached(length, waits_for_drafts, evaluation.num_outcomes, evaluation.draft_ahead)
        return self.chain(length, waits_for_drafts)

    def is_allowed(self, evaluation: Evaluation) -> bool:
        """Whether a choice respects the inputs' limits."""
        inputs = self.inputs
        return (
            max(evaluation.draft_length, evaluation.draft_ahead) <= inputs.longest_draft
            and evaluation.num_outcomes <= inputs.max_outcomes
            and evaluation.wait_s <= inputs.max_wait_s
        )

    def _arriving(
        self, length: int, wait_s: float, waits_for_drafts: bool, slow: float = 1.0, fraction: float = 1.0
    ) -> tuple[float, float]:
        """Tokens and seconds from the end of a step to the end of the step that verifies its draft.

        Args:
            length: tokens of the draft.
            wait_s: from the end of the first step to the arrival of the draft.
            waits_for_drafts: whether the verifier waits for it.
            slow: how many times as long as alone a step takes.
            fraction: of the accepted tokens of a fresh draft, how many this draft gets.
        """
        if waits_for_drafts or wait_s <= 0:
            return 1.0 + fraction * self._gain(length), max(wait_s, 0.0) + self._step_s(length) * slow
        missed = math.ceil(wait_s / (self._plain_s * slow))
        left = max(0, length - missed)
        tokens = missed + 1.0 + fraction * max(0.0, self._gain(length) - self._gain(min(missed, length)))
        return tokens, (missed * self._plain_s + self._step_s(left)) * slow

    def _wait_budget_s(self, wait_s: float) -> float:
        """How long to wait for a draft that arrives after ``wait_s`` in the mean."""
        return min(wait_s + self.inputs.slowest_rtt_s - self.inputs.rtt_s, self.inputs.max_wait_s)

    def _waiting_for_others_s(self, hit_rate: float, late_s: float, miss_wait_s: float) -> float:
        """What waiting costs a step beyond the mean wait of its sequences: one sequence that misses delays all of
        them.
        """
        load = self.inputs.num_sequences
        all_hit, none_hit = hit_rate**load, (1 - hit_rate) ** load
        step_wait_s = all_hit * late_s + none_hit * miss_wait_s
        step_wait_s += (1 - all_hit - none_hit) * max(late_s, miss_wait_s)
        return step_wait_s - (hit_rate * late_s + (1 - hit_rate) * miss_wait_s)

    def _evaluation(
        self,
        length: int,
        waits_for_drafts: bool,
        tokens: float,
        seconds: float,
        wait_budget_s: float = 0.0,
        outcomes: int = 0,
        ahead: int = 0,
        hit_rate: float = 0.0,
        wait_s: float = 0.0,
    ) -> Evaluation:
        rate = self.inputs.num_sequences * tokens / seconds
        speedup = tokens * (self._plain_s / seconds)
        return Evaluation(
            length, waits_for_drafts, wait_budget_s, rate, speedup, outcomes, ahead, hit_rate, wait_s
        )

    def _step_s(self, length: int) -> float:
        """Seconds of a step in which every sequence verifies that many tokens."""
        seconds = self._steps.get(length)
        if seconds is None:
            seconds = self._steps[length] = self.inputs.step_time(self.inputs.num_sequences * (1 + length))
        return seconds

    def _gain(self, length: int) -> float:
        """Expected accepted tokens of a draft."""
        if length >= len(self._gains):
            self._gains = [0.0, *itertools.accumulate(self.inputs.path_acceptances(2 * length))]
        return self._gains[length]

    def _hit_rate(self, draft_length: int, outcomes: int) -> float:
        rates = self._hits.get(draft_length)
        if rates is None or len(rates) < outcomes:
            most = max(outcomes, self.inputs.max_outcomes)
            rates = self._hits[draft_length] = self.inputs.hit_rates(draft_length, most)
        return rates[outcomes - 1]
