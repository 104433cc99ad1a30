"""The cost model: what a speculation cycle brings and takes, for each way to run it.

Responsible for: expected tokens per second of one choice of length, waiting and outcomes.

Deliberately does not know: which choice is best (`planner`), estimators, clocks, single tokens (that is `budget`).

Called by: `planner`, `state`, the scheduler service, the simulator.

With n sequences, E(k) = 1 + sum of the first k path acceptances, T(rows) the step time and D(k) the draft time:
    co-located          n E(k) / (T(n (1 + k)) + D(k))
    separate, holding   n E(k) / (T(n (1 + k)) + wait),  wait = D(k) + RTT + queue - overlap
    separate, running   the verifier takes m = ceil(wait / T(n)) plain steps while the draft travels; the first m
                        drafted tokens are then committed already, and with probability path acceptance(m) they were
                        right: n (m + 1 + sum of path acceptances m+1..k) / ((1 + s) (m T(n) + T(n (1 + k - m)))),
                        s by how much a drafter at work beside it slows a step down
    enumerating         while a step is made, the drafter drafts k tokens past each of its W likeliest outcomes, in
                        time D'(W, k). With probability h(W) the outcome is among them (a hit): the next step
                        verifies that path at once if it has landed, queue + D'(W, k) + RTT <= T; if not, it waits
                        for the rest, or runs without. Otherwise (a miss) a draft of g tokens is made from nothing,
                        and the verifier holds or runs as above. A hit is more likely after a step that verified few
                        tokens, so steps after hits and after misses are two states of a chain. A held step waits as
                        soon as one of its sequences misses. For one sequence and g = k it comes to
                        E / (h max(T, queue + D' + RTT) + (1 - h) (T + wait))  (SSD, arXiv 2603.03251;
                        theory.outcomes). Behind a hit a drafter of features has drafted on its own outputs: of the
                        accepted tokens there is a share
A longer round trip makes the best length of the second longer, more load makes each shorter.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from paceline.scheduling.inputs import Placement, PlanInputs


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A way to speculate and what it is expected to bring.

    Attributes:
        draft_length: tokens per draft; 0 is plain decoding.
        waits_for_drafts: whether the verifier waits for a draft that is not there (separate placement only).
        wait_budget_s: how long it may wait.
        tokens_per_s: of all sequences together.
        speedup: over plain decoding under the same load.
        outcomes: outcomes of a step that are drafted past while it is made; 0 for none.
        ahead: tokens drafted past each of them.
        hit_rate: share of steps whose outcome is among them.
        wait_s: mean time that a step waits where it waits longest, without what overlaps today.
    """

    draft_length: int
    waits_for_drafts: bool
    wait_budget_s: float
    tokens_per_s: float
    speedup: float
    outcomes: int = 0
    ahead: int = 0
    hit_rate: float = 0.0
    wait_s: float = 0.0

    @property
    def is_enumerating(self) -> bool:
        """Whether outcomes are drafted past."""
        return self.outcomes > 0


class CostModel:
    """Evaluates choices under one set of inputs; what they have in common is computed once."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self._plain_s = inputs.step_time(inputs.num_sequences)
        self._gains = [0.0]  # of the first k draft tokens
        self._steps: dict[int, float] = {}
        self._hits: dict[int, tuple[float, ...]] = {}

    def plain(self) -> Evaluation:
        """Plain decoding: nothing is drafted, nobody waits."""
        return self._evaluation(0, False, 1.0, self._plain_s)

    def chain(self, length: int, waits_for_drafts: bool) -> Evaluation:
        """Drafts of one length, made when a step has ended."""
        if length == 0:
            return self.plain()
        inputs = self.inputs
        if inputs.placement is Placement.COLOCATED:
            seconds = self._step_s(length) + inputs.draft_time(length)
            return self._evaluation(length, False, 1.0 + self._gain(length), seconds)
        tokens, seconds = self._arriving(length, inputs.wait_s(length), waits_for_drafts)
        if not waits_for_drafts:
            return self._evaluation(length, False, tokens, seconds * (1 + inputs.concurrent_slowdown))
        # What overlaps today may not tomorrow, and a hold that ends too early costs both.
        wait_s = inputs.whole_wait_s(length)
        wait_budget_s = min(wait_s + inputs.slowest_rtt_s - inputs.rtt_s, inputs.max_wait_s)
        return self._evaluation(length, True, tokens, seconds, wait_budget_s, wait_s=wait_s)

    def enumerating(self, length: int, waits_for_drafts: bool, outcomes: int, ahead: int) -> Evaluation:
        """Paths of ``ahead`` tokens past outcomes drafted during each step; drafts of ``length`` after a miss."""
        inputs = self.inputs
        slow = 1 + inputs.concurrent_slowdown
        build_s = inputs.queue_s + inputs.enumeration_s(outcomes, ahead)
        after_hit, after_miss = self._hit_rate(ahead, outcomes), self._hit_rate(length, outcomes)
        leaving = 1 - after_hit + after_miss
        share_after_hit = after_miss / leaving if leaving > 0 else 0.0
        miss_wait_s = inputs.wait_s(length)
        miss_tokens, miss_s = self._arriving(length, miss_wait_s, waits_for_drafts, slow)
        tokens = seconds = longest_late_s = 0.0
        for share, hit_rate, verified in (
            (share_after_hit, after_hit, ahead),
            (1 - share_after_hit, after_miss, length),
        ):
            late_s = max(0.0, build_s + inputs.rtt_s - self._step_s(verified) * slow)
            hit_tokens, hit_s = self._arriving(ahead, late_s, waits_for_drafts, slow, inputs.ahead_fraction)
            tokens += share * (hit_rate * hit_tokens + (1 - hit_rate) * miss_tokens)
            seconds += share * (hit_rate * hit_s + (1 - hit_rate) * miss_s)
            if waits_for_drafts and inputs.num_sequences > 1:
                seconds += share * self._waiting_for_others_s(hit_rate, late_s, miss_wait_s)
            longest_late_s = max(longest_late_s, late_s)
        wait_s = max(longest_late_s, inputs.whole_wait_s(length))
        wait_budget_s = (
            min(wait_s + inputs.slowest_rtt_s - inputs.rtt_s, inputs.max_wait_s) if waits_for_drafts else 0.0
        )
        return self._evaluation(
            length,
            waits_for_drafts,
            tokens,
            seconds,
            wait_budget_s,
            outcomes,
            ahead,
            share_after_hit * after_hit + (1 - share_after_hit) * after_miss,
            wait_s if waits_for_drafts else 0.0,
        )

    def again(self, evaluation: Evaluation) -> Evaluation:
        """The same choice under these inputs."""
        length, waits_for_drafts = evaluation.draft_length, evaluation.waits_for_drafts
        if evaluation.is_enumerating:
            return self.enumerating(length, waits_for_drafts, evaluation.outcomes, evaluation.ahead)
        return self.chain(length, waits_for_drafts)

    def is_allowed(self, evaluation: Evaluation) -> bool:
        """Whether a choice keeps to the inputs' limits."""
        inputs = self.inputs
        return (
            max(evaluation.draft_length, evaluation.ahead) <= inputs.longest_draft
            and evaluation.outcomes <= inputs.max_outcomes
            and evaluation.wait_s <= inputs.max_wait_s
        )

    def _arriving(
        self, length: int, wait_s: float, waits_for_drafts: bool, slow: float = 1.0, share: float = 1.0
    ) -> tuple[float, float]:
        """Tokens and seconds from the end of a step to the end of the one that verifies a draft that comes after
        ``wait_s``; steps take ``slow`` times as long as alone, and of the accepted tokens there is this ``share``."""
        if waits_for_drafts or wait_s <= 0:
            return 1.0 + share * self._gain(length), max(wait_s, 0.0) + self._step_s(length) * slow
        missed = math.ceil(wait_s / (self._plain_s * slow))
        left = max(0, length - missed)
        tokens = missed + 1.0 + share * max(0.0, self._gain(length) - self._gain(min(missed, length)))
        return tokens, (missed * self._plain_s + self._step_s(left)) * slow

    def _waiting_for_others_s(self, hit_rate: float, late_s: float, miss_wait_s: float) -> float:
        """What a held step costs beyond the mean wait of its sequences: one that misses holds up all of them."""
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
        """Seconds of a step in which every sequence verifies so many tokens."""
        seconds = self._steps.get(length)
        if seconds is None:
            seconds = self._steps[length] = self.inputs.step_time(self.inputs.num_sequences * (1 + length))
        return seconds

    def _gain(self, length: int) -> float:
        """Accepted tokens expected of a draft."""
        if length >= len(self._gains):
            self._gains = [0.0, *itertools.accumulate(self.inputs.path_acceptances(2 * length))]
        return self._gains[length]

    def _hit_rate(self, draft_length: int, outcomes: int) -> float:
        rates = self._hits.get(draft_length)
        if rates is None or len(rates) < outcomes:
            most = max(outcomes, self.inputs.max_outcomes)
            rates = self._hits[draft_length] = self.inputs.hit_rates(draft_length, most)
        return rates[outcomes - 1]
