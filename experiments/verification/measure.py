"""Steps of a real target and the verification of their logits, in turn, timed.

Deliberately does not know: how figures are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
from tokenizers import Tokenizer
from torch import Tensor

from experiments.bench.prompts import embedded_prompts
from experiments.verification.cases import CASES, FIRST_POSITION, Drafts, Work, make_work
from paceline.target import SequenceRows, TargetEngine

STEP = "step"


@dataclass
class Samples:
    """Microseconds of one kind of work, one number for each round."""

    elapsed_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Median, tenth and ninetieth percentile, smallest and largest."""
        tenths = quantiles(self.elapsed_us, n=10) if len(self.elapsed_us) > 1 else self.elapsed_us * 9
        return {
            "median_us": round(median(self.elapsed_us), 1),
            "p10_us": round(tenths[0], 1),
            "p90_us": round(tenths[8], 1),
            "min_us": round(min(self.elapsed_us), 1),
            "max_us": round(max(self.elapsed_us), 1),
        }


@dataclass
class Measured:
    """What one batch size gave: the step, and each case beside it.

    Attributes:
        num_sequences: sequences in a step.
        num_rows: rows in a step, with logits for each.
        step: the target's forward pass alone.
        cases: verification of that step's logits.
        accepted: draft tokens accepted per sequence, by case.
    """

    num_sequences: int
    num_rows: int
    step: Samples = field(default_factory=Samples)
    cases: dict[str, Samples] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)

    def share(self, case: str) -> float:
        """Verification as a part of step and verification together, medians."""
        verify = median(self.cases[case].elapsed_us)
        return verify / (verify + median(self.step.elapsed_us))


def load_engine(model_dir: Path, dtype: str, num_threads: int) -> TargetEngine:
    """The target as the verifier loads it."""
    return TargetEngine.load(model_dir, dtype=getattr(torch, dtype), num_threads=num_threads)


def some_text(model_dir: Path) -> list[int]:
    """The benchmark's prompts as one run of tokens, so that logits look like those of real requests."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return tokenizer.encode("\n\n".join(prompt.text for prompt in embedded_prompts())).ids


def measure(
    engine: TargetEngine,
    text: Sequence[int],
    num_sequences: int,
    drafts: Drafts,
    rounds: int,
    progress: Callable[[str], None],
) -> Measured:
    """Steps of `num_sequences` sequences with chains of drafts, each followed by every case's verification.

    The first round warms up and does not count.
    """
    measured = Measured(num_sequences, num_sequences * (1 + drafts.length))
    width = FIRST_POSITION + 1 + drafts.length
    tokens = [_window(text, 37 * index, width) for index in range(num_sequences)]
    slots = [engine.open() for _ in range(num_sequences)]
    try:
        for slot, row in zip(slots, tokens, strict=True):
            engine.step([SequenceRows(slot, row[:FIRST_POSITION], num_logits="last")])
        batch = [SequenceRows(slot, row[FIRST_POSITION:]) for slot, row in zip(slots, tokens, strict=True)]
        works: dict[str, Work] = {}
        for round_ in range(rounds + 1):
            progress(f"{num_sequences} sequences, round {round_} of {rounds}")
            started = time.perf_counter()
            output = engine.step(batch)
            logits, maxima = (
                output.rows,
                output.row_maxima,
            )  # in the order of the slots, which is that of the batch
            elapsed = {STEP: time.perf_counter() - started}
            for slot in slots:
                engine.truncate(slot, FIRST_POSITION)
            for name, work in _works(works, logits, maxima, num_sequences, drafts):
                started = time.perf_counter()
                accepted = work.run()
                elapsed[name] = time.perf_counter() - started
                measured.accepted[name] = accepted / num_sequences
            if round_:
                measured.step.elapsed_us.append(elapsed.pop(STEP) * 1e6)
                for name, seconds in elapsed.items():
                    measured.cases.setdefault(name, Samples()).elapsed_us.append(seconds * 1e6)
    finally:
        for slot in slots:
            engine.close(slot)
    return measured


def _works(
    known: dict[str, Work],
    logits: Tensor,
    maxima: Tensor | None,
    num_sequences: int,
    drafts: Drafts,
) -> Iterator[tuple[str, Work]]:
    """Each case's work on these logits; drafts are made once, as every round's logits are the same."""
    for case in CASES:
        if case.name not in known:
            known[case.name] = make_work(case, logits, maxima, num_sequences, drafts)
        first = known[case.name]
        yield case.name, Work(logits, maxima, first.trees, first.lengths, first.params)


def _window(text: Sequence[int], first: int, width: int) -> list[int]:
    """So many tokens from some place on, the text's beginning following its end."""
    return [text[(first + place) % len(text)] for place in range(width)]
