"""Runs points and cycles in turn, and sums up what was seen.

Responsible for: the order of the runs and the figures of each. Deliberately does not know: files, pictures. Used by
experiments.pipeline.__main__.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

from experiments.pipeline.cell import MAX_NODES, WAIT_BUDGET_US, Cell, Cycle, Shape, parse_counts
from experiments.pipeline.counts import Counts
from experiments.pipeline.laboratory import Laboratory
from experiments.pipeline.prediction import best_synchronous_length, expected_tokens, predicted
from experiments.pipeline.sample import Sample
from paceline.contract.errors import InvalidRequestError

Progress = Callable[[str], None]

PROMPT_SHARE = 0.2
"""A pass that follows the one before by so much of a step more than a plain one does has waited for nothing."""


@dataclass(slots=True)
class Arm:
    """One cycle at one point, and what was seen of it.

    Attributes:
        rounds: of each round, tokens per second summed over the sequences.
        wall_s: time in which they ran, first request to last answer.
    """

    cell: Cell
    cycle: Cycle
    shape: Shape
    rounds: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    wall_s: float = 0.0

    def run(self, laboratory: Laboratory, num_tokens: int) -> None:
        """One round."""
        before, begun_s = laboratory.counts(), time.perf_counter()
        samples = laboratory.generate(
            self.cell.num_sequences, num_tokens, speculation=self.cycle is not Cycle.PLAIN
        )
        self.wall_s += time.perf_counter() - begun_s
        self.counts = self.counts + (laboratory.counts() - before)
        self.samples += samples
        self.rounds.append(sum(sample.tokens_per_s for sample in samples))

    def figures(self, plain: Arm) -> dict[str, Any]:
        """What the report says about it; speeds are over `plain`'s of the same round."""
        ratios = [mine / its for mine, its in zip(self.rounds, plain.rounds, strict=True)]
        counts, num_tokens = self.counts, sum(sample.num_tokens for sample in self.samples)
        num_passes = max(1, sum(sample.num_passes for sample in self.samples))
        forecast = predicted(self.cycle, self.cell, self.shape)
        gaps_s = _gaps_s(self.samples)
        mine, its = _mean(gaps_s), _mean(_gaps_s(plain.samples))
        prompt_s = its + PROMPT_SHARE * self.cell.plain_step_ms * 1e-3
        return {
            "cycle": str(self.cycle),
            "acceptance": self.cell.dials.acceptance,
            "cost": round(self.cell.cost, 4),
            "round_trip_ms": round(self.cell.round_trip_ms, 3),
            "round_trip": round(self.cell.round_trip, 4),
            "num_sequences": self.cell.num_sequences,
            "draft_length": self.shape.draft_length,
            "draft_ahead": self.shape.draft_ahead,
            "outcomes": self.shape.outcomes,
            "wait_budget_us": self.shape.wait_budget_us,
            "tokens_per_s": round(median(self.rounds), 2),
            "speedup": round(median(ratios), 3),
            "speedup_min": round(min(ratios), 3),
            "speedup_max": round(max(ratios), 3),
            "predicted": None if forecast is None else round(forecast, 3),
            "tokens_per_pass": round(num_tokens / num_passes, 3),
            "expected_tokens_per_pass": _rounded(self._expected_tokens()),
            "ms_per_pass": round(1e3 * mine, 3),
            "without_luck": _rounded(self._without_luck(mine / its)),
            "at_once": round(sum(gap_s <= prompt_s for gap_s in gaps_s) / len(gaps_s), 4),
            "hit_rate": round(counts.num_cache_hits / counts.num_drafts, 4) if counts.num_drafts else None,
            "drafted": round(counts.num_drafts / num_passes, 4),
            "bubble": round(1 - counts.step_s / self.wall_s, 4),
            "step_ms": round(1e3 * counts.step_s / max(1.0, counts.num_steps), 3),
            "held_ms": round(1e3 * counts.draft_wait_s / max(1.0, counts.num_steps), 3),
            "draft_ms": round(1e3 * counts.draft_s / max(1.0, counts.num_draft_calls), 3),
            "drafter_busy": round(counts.draft_s / self.wall_s, 4),
            "bytes_per_token": round(counts.link_bytes / max(1, num_tokens), 1),
            "draft_tokens_per_token": round(counts.num_draft_tokens / max(1, num_tokens), 3),
            "identical": all(sample.is_identical for sample in self.samples),
        }

    def _expected_tokens(self) -> float | None:
        """Tokens of a pass in the mean over all luck, where every pass has a whole draft."""
        if self.cycle is Cycle.PLAIN:
            return 1.0
        if not self.shape.wait_budget_us:  # nothing waits, or the scheduler says when
            return None
        return expected_tokens(self.cell.dials.acceptance, self.shape.draft_length)

    def _without_luck(self, pass_length: float) -> float | None:
        """Speed over plain with the time of a pass as measured, in plain ones, and its tokens as expected."""
        tokens = self._expected_tokens()
        return None if tokens is None else tokens / pass_length

    def over_best(self, others: Sequence[Arm]) -> float:
        """Speed over that of the fastest of `others`, in the median of the rounds."""
        best = max(others, key=lambda arm: median(arm.rounds))
        return median(mine / its for mine, its in zip(self.rounds, best.rounds, strict=True))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths that are fixed by hand; None leaves one to the point.

    Attributes:
        synchronous: draft length of the synchronous cycle; else the best that the theory names.
        ahead: draft length of the pipelined cycles.
        past: tokens past the draft, or past each outcome.
        outcomes: outcomes drafted past.
        wait_budget_us: how long a step of the pipelined cycles waits for a draft that is due; else the cycle's own
            rule.
    """

    synchronous: int | None = None
    ahead: int | None = None
    past: int | None = None
    outcomes: int = 8
    wait_budget_us: int | None = None


FIRST_AHEAD = 4
"""Tokens of the first answer where no step waits for it."""


def shape_of(cycle: Cycle, cell: Cell, lengths: Lengths) -> Shape:
    """The lengths of a cycle at a point."""
    best = lengths.synchronous or best_synchronous_length(cell)
    if cycle in (Cycle.PLAIN, Cycle.PLANNED):
        return Shape(1 if cycle is Cycle.PLAIN else 0)
    if cycle is Cycle.SYNCHRONOUS:
        return Shape(best, wait_budget_us=WAIT_BUDGET_US)
    if cycle is Cycle.AHEAD:
        # A step that does not wait is served by the first few tokens that come; the others follow as they are made.
        length = lengths.ahead or min(best, FIRST_AHEAD)
        past = lengths.past or min(3 * length, MAX_NODES - length)
        return Shape(length, past, wait_budget_us=lengths.wait_budget_us or 0)
    # An entry of outcomes has a frame's nodes: the draft, and a path of the same length behind each outcome.
    fits = max(1, (MAX_NODES - lengths.outcomes) // (lengths.outcomes + 1))
    length = lengths.ahead or min(best, fits)
    return Shape(
        length, lengths.past or length, lengths.outcomes, _or(lengths.wait_budget_us, WAIT_BUDGET_US)
    )


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def parse_cycles(text: str, lengths: Lengths) -> list[tuple[Cycle, Lengths]]:
    """Cycles by commas, each with its own draft length behind a colon where the common one does not hold.

    Raises:
        InvalidRequestError: no such cycle, or no such length.
    """
    found: list[tuple[Cycle, Lengths]] = []
    for part in text.split(","):
        name, _, length = part.strip().partition(":")
        try:
            cycle = Cycle(name)
        except ValueError:
            raise InvalidRequestError("cycles", f"{name!r} is none of {', '.join(Cycle)}") from None
        own = lengths
        if length:
            (number,) = parse_counts(length, "cycles", MAX_NODES - 1)
            own = replace(lengths, synchronous=number, ahead=number)
        if cycle is not Cycle.PLAIN:
            found.append((cycle, own))
    return found


def arms_of(cells: Sequence[Cell], cycles: Sequence[tuple[Cycle, Lengths]]) -> list[Arm]:
    """Every cycle at every point; plain decoding once for each number of sequences, before what is measured by it."""
    arms: list[Arm] = []
    for num_sequences in sorted({cell.num_sequences for cell in cells}):
        same = [cell for cell in cells if cell.num_sequences == num_sequences]
        arms.append(Arm(same[0], Cycle.PLAIN, Shape(1)))
        arms += [
            Arm(cell, cycle, shape_of(cycle, cell, lengths)) for cell in same for cycle, lengths in cycles
        ]
    return arms


def run_rounds(
    laboratory: Laboratory,
    arms: Sequence[Arm],
    *,
    num_rounds: int,
    num_tokens: int,
    num_plain_tokens: int,
    seed: int,
    progress: Progress,
) -> None:
    """All arms in turn, again and again, so that the machine's drift falls on all of them alike.

    Args:
        laboratory: that is up.
        arms: filled by this.
        num_rounds: rounds; each has a luck of its own, which all arms share.
        num_tokens: tokens of a generation.
        num_plain_tokens: the same for plain decoding, whose speed does not depend on luck.
        seed: of the first round's luck.
        progress: told what runs.
    """
    progress("warming up")
    for arm in arms[:2]:
        laboratory.set(arm.cell, arm.shape, seed)
        laboratory.generate(arm.cell.num_sequences, min(num_tokens, 32), speculation=True)
    for arm in arms:
        if arm.cycle is Cycle.PLANNED:  # the scheduler learns what its decisions rest on
            laboratory.set(arm.cell, arm.shape, seed)
            laboratory.generate(arm.cell.num_sequences, num_tokens, speculation=True)
    for index in range(num_rounds):
        for arm in arms:
            progress(
                f"round {index + 1} of {num_rounds}: {arm.cycle}, a={arm.cell.dials.acceptance:g}, "
                f"c={arm.cell.cost:.3g}, {arm.cell.round_trip_ms:g} ms, {arm.cell.num_sequences} at once"
            )
            laboratory.set(arm.cell, arm.shape, seed + index)
            arm.run(laboratory, num_plain_tokens if arm.cycle is Cycle.PLAIN else num_tokens)


def figures_of(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The figures of every arm, beside plain decoding of as many sequences."""
    plain = {arm.cell.num_sequences: arm for arm in arms if arm.cycle is Cycle.PLAIN}
    found = []
    for arm in arms:
        figures = arm.figures(plain[arm.cell.num_sequences])
        if arm.cycle is Cycle.PLANNED:
            fixed = [other for other in arms if other.cell == arm.cell and other.cycle is not Cycle.PLANNED]
            rivals = [plain[arm.cell.num_sequences], *fixed]
            figures["over_best_fixed"] = round(arm.over_best(rivals), 3)
        found.append(figures)
    return found


def _gaps_s(samples: Sequence[Sample]) -> list[float]:
    """Times between two chunks of a generation: one pass of the target each."""
    return [
        later - earlier for sample in samples for (earlier, _), (later, _) in pairwise(sample.arrivals[1:])
    ]


def _mean(gaps_s: Sequence[float]) -> float:
    return mean(gaps_s) if gaps_s else 0.0


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)
