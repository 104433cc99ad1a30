"""How long to draft and how long to wait: the numbers that maximise committed tokens per second.

Responsible for: the cost model of a speculation cycle in both placements, and the best length under it.

Deliberately does not know: estimators, clocks, history (that is `state`), single tokens (that is `budget`).

Called by: `state.PolicyState`, the scheduler service, the simulator.

With n sequences, E(k) = 1 + sum of the first k survivals, T(rows) the step time and D(k) the draft time:
    co-located          n E(k) / (T(n (1 + k)) + D(k))
    separate, holding   n E(k) / (T(n (1 + k)) + wait),  wait = max(0, D(k) + RTT + queue - overlap)
    separate, running   the verifier takes m = ceil(wait / T(n)) plain steps while the draft travels; the first m
                        drafted tokens are then committed already, and with probability survival(m) they were right:
                        n (m + 1 + sum of survivals m+1..k) / ((1 + s) (m T(n) + T(n (1 + k - m)))),
                        s by how much a drafter at work beside it slows a step down
A longer round trip makes the best length of the first two longer, more load makes it shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from paceline.scheduling.policy import Policy

# A tree may lengthen a step by this factor over a chain of the same depth, and have this many nodes for each of its
# levels. EAGLE-3 on SmolLM2, depth 5: 12 nodes in place of 5 gave a quarter more tokens per pass for a step a tenth
# longer.
_TREE_STEP = 1.12
NODES_PER_LEVEL = 3
# What is drafted ahead is used where all of the draft was accepted. Below this chance it only costs messages, and below
# the share by which a drafter at work slows the target down it costs more than it brings.
_MIN_AHEAD_SURVIVAL = 0.2


class Placement(StrEnum):
    """Where a sequence's drafter sits."""

    COLOCATED = "colocated"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a plan depends on.

    Attributes:
        placement: which cost model applies.
        acceptance: conditional acceptance per draft position; positions beyond repeat the last.
        step_time: seconds of a target step over that many rows.
        draft_time: seconds to draft that many tokens for every sequence, at the present load.
        rtt_s: mean time on the wire and in serialisation, both ways. Ignored when co-located.
        rtt_p95_s: its 95th percentile, for the hold; None takes the mean.
        queue_s: mean wait at the drafter.
        overlap_s: how much of draft and round trip is hidden behind the target's step, because drafters draft
            ahead.
        concurrent_slowdown: how much longer, as a fraction, a step takes while the drafter works: 0 on machines of
            their own, more where the two share a memory bus.
        num_sequences: sequences that decode together.
        max_draft_length: the longest draft allowed.
        max_nodes: most draft nodes per sequence and step.
        max_hold_s: the longest a sequence may wait.
        margin: speculation must be faster than plain decoding by this fraction.
    """

    placement: Placement
    acceptance: tuple[float, ...]
    step_time: Callable[[int], float]
    draft_time: Callable[[int], float]
    rtt_s: float = 0.0
    rtt_p95_s: float | None = None
    queue_s: float = 0.0
    overlap_s: float = 0.0
    concurrent_slowdown: float = 0.0
    num_sequences: int = 1
    max_draft_length: int = 8
    max_nodes: int = 32
    max_hold_s: float = 0.05
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.acceptance):
            raise ValueError(f"acceptance rates must lie between 0 and 1: {self.acceptance}")
        for field in ("rtt_s", "queue_s", "overlap_s", "concurrent_slowdown", "max_hold_s", "margin"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} must be finite and not negative, got {value!r}")
        if self.rtt_p95_s is not None and not (math.isfinite(self.rtt_p95_s) and self.rtt_p95_s >= 0):
            raise ValueError(f"rtt_p95_s must be finite and not negative, got {self.rtt_p95_s!r}")
        if self.num_sequences < 1 or self.max_draft_length < 0 or self.max_nodes < 0:
            raise ValueError("num_sequences must be at least 1, max_draft_length and max_nodes not negative")

    def survivals(self, length: int) -> list[float]:
        """P(token j and all before it accepted) for j in 1..length."""
        rates = [*self.acceptance[:length]]
        rates += [rates[-1] if rates else 0.0] * (length - len(rates))
        return list(itertools.accumulate(rates, lambda product, rate: product * rate))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A length and what it is expected to bring.

    Attributes:
        draft_length: tokens per draft; 0 is plain decoding.
        is_holding: whether the verifier waits for the draft (separate placement only).
        hold_s: how long it may wait.
        tokens_per_s: of all sequences together.
        speedup: over plain decoding under the same load.
    """

    draft_length: int
    is_holding: bool
    hold_s: float
    tokens_per_s: float
    speedup: float


def evaluate_length(inputs: PlanInputs, length: int, is_holding: bool) -> Evaluation:
    """What drafts of one length bring under the cost model (see the module's formulas)."""
    load = inputs.num_sequences
    plain_s = inputs.step_time(load)
    tokens, cycle_s, hold_s = 1.0, plain_s, 0.0
    if length > 0:
        survivals = inputs.survivals(length)
        draft_s = inputs.draft_time(length)
        if inputs.placement is Placement.COLOCATED:
            tokens += math.fsum(survivals)
            cycle_s = inputs.step_time(load * (1 + length)) + draft_s
        else:
            wait_s = _wait_s(inputs, length, inputs.rtt_s)
            if is_holding:
                tokens += math.fsum(survivals)
                cycle_s = inputs.step_time(load * (1 + length)) + wait_s
                slowest_rtt_s = (
                    inputs.rtt_s if inputs.rtt_p95_s is None else max(inputs.rtt_p95_s, inputs.rtt_s)
                )
                hold_s = min(_wait_s(inputs, length, slowest_rtt_s), inputs.max_hold_s)
            else:
                missed = math.ceil(wait_s / plain_s)
                left = max(0, length - missed)
                tokens += missed + math.fsum(survivals[missed:])
                cycle_s = missed * plain_s + inputs.step_time(load * (1 + left))
                cycle_s *= 1 + inputs.concurrent_slowdown
    rate = load * tokens / cycle_s
    return Evaluation(length, is_holding, hold_s, rate, tokens * (plain_s / cycle_s))


def _wait_s(inputs: PlanInputs, length: int, rtt_s: float) -> float:
    """How long after a commit its draft arrives, beyond what the target's step hides."""
    return max(0.0, inputs.draft_time(length) + rtt_s + inputs.queue_s - inputs.overlap_s)


def evaluate(inputs: PlanInputs) -> Evaluation:
    """The best length; plain decoding (length 0, speedup 1) takes part and wins ties."""
    best = evaluate_length(inputs, 0, False)
    for length in range(1, min(inputs.max_draft_length, inputs.max_nodes) + 1):
        for is_holding in (False, True) if inputs.placement is Placement.SEPARATE else (False,):
            candidate = evaluate_length(inputs, length, is_holding)
            if is_holding and _wait_s(inputs, length, inputs.rtt_s) > inputs.max_hold_s:
                continue
            if candidate.tokens_per_s > best.tokens_per_s * (1 + 1e-12):
                best = candidate
    return best


def policy_of(inputs: PlanInputs, evaluation: Evaluation, version: int, reason: str) -> Policy:
    """The policy that carries out an evaluation."""
    length = evaluation.draft_length
    if length == 0:
        return Policy.off(version, reason)
    load = inputs.num_sequences
    limit_s = inputs.step_time(load * (1 + length)) * _TREE_STEP
    budget, most = length, min(inputs.max_nodes, NODES_PER_LEVEL * length)
    while budget < most and inputs.step_time(load * (2 + budget)) <= limit_s:
        budget += 1
    ahead = 0
    needed = max(_MIN_AHEAD_SURVIVAL, inputs.concurrent_slowdown)
    if inputs.placement is Placement.SEPARATE and inputs.survivals(length)[-1] >= needed:
        # As many tokens as can be drafted while the target verifies, but no more than one further draft.
        per_token_s = inputs.draft_time(length) / length
        step_s = inputs.step_time(load * (1 + length))
        ahead = length if per_token_s * length <= step_s else int(step_s / per_token_s)
    return Policy(version, length, budget, math.ceil(evaluation.hold_s * 1e6), ahead, reason)


def plan(inputs: PlanInputs, version: int = 1) -> Policy:
    """The best policy for these inputs alone; off when it would not beat plain decoding by the margin."""
    best = evaluate(inputs)
    if best.speedup < 1 + inputs.margin:
        return Policy.off(version, f"off: best speedup {best.speedup:.3f} is below {1 + inputs.margin:.3f}")
    return policy_of(inputs, best, version, describe(best))


def describe(evaluation: Evaluation) -> str:
    """One line for people."""
    waiting = f", hold up to {evaluation.hold_s * 1e3:.2f} ms" if evaluation.is_holding else ""
    return f"length {evaluation.draft_length}{waiting}: expected speedup {evaluation.speedup:.2f}"
