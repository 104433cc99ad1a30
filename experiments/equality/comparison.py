"""Plain texts against drafted ones and against those of company: how many are equal, and where the others part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.equality.configurations import Configuration
from experiments.equality.decoding import DraftShape, Text, decode
from paceline.sampling.params import SamplingParams

TIE = 1e-4
"""Candidates closer than this count as tied."""

SHAPES = {"chain of 4": DraftShape(4, 4), "tree of 12, depth 5": DraftShape(5, 12)}
COMPANY = 4
"""Sequences in one step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text left the plain one.

    Attributes:
        prompt: index of the prompt.
        place: generated tokens before it.
        gap: distance of the plain run's two best candidates there.
    """

    prompt: int
    place: int
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether the two candidates counted as tied."""
        return self.gap < TIE


def differences(plain: Sequence[Text], other: Sequence[Text]) -> list[Difference]:
    """The first difference of each pair of texts that differ."""
    found = []
    for prompt, (text, compared) in enumerate(zip(plain, other, strict=True)):
        for place, (token, its) in enumerate(zip(text.tokens, compared.tokens, strict=True)):
            if token != its:
                found.append(Difference(prompt, place, text.gaps[place]))
                break
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        prompts: token ids.
        num_tokens: tokens of each text.
        num_threads: torch threads.
    """

    model_dir: Path
    drafter_dir: Path
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    num_threads: int


def measure(plan: Plan, configuration: Configuration, progress: Callable[[str], None]) -> dict[str, Any]:
    """All comparisons of one configuration, and its step times, as the report has them."""
    engine, drafter = configuration.load(plan.model_dir, plan.drafter_dir, plan.num_threads)
    cells: list[dict[str, Any]] = []
    plain_s: list[float] = []
    drafted_s: list[float] = []
    for sampling_name, samplings in _samplings(len(plan.prompts)).items():

        def run(drafts: DraftShape | None, group: int, name: str) -> list[Text]:
            progress(f"{configuration.name}: {sampling_name}, {name}")  # noqa: B023  called at once
            texts: list[Text] = []
            for begin in range(0, len(plan.prompts), group):
                part = slice(begin, begin + group)
                texts += decode(
                    engine,
                    plan.prompts[part],
                    samplings[part],  # noqa: B023
                    plan.num_tokens,
                    drafter if drafts is not None else None,
                    drafts,
                )
            return texts

        plain = run(None, 1, "plain")
        plain_s += [step_s for text in plain for step_s in text.step_s]
        for name, shape in SHAPES.items():
            drafted = run(shape, 1, name)
            drafted_s += [step_s for text in drafted for step_s in text.step_s]
            cells.append(_cell(sampling_name, name, plain, drafted))
        cells.append(_cell(sampling_name, f"plain, {COMPANY} together", plain, run(None, COMPANY, "company")))
    return {
        "configuration": configuration.name,
        **asdict(configuration),
        "cells": cells,
        "plain_step_ms": median(plain_s) * 1e3,
        "drafted_step_ms": median(drafted_s) * 1e3,
    }


def _samplings(count: int) -> dict[str, list[SamplingParams]]:
    return {
        "greedy": [SamplingParams(temperature=0.0)] * count,
        "coupled": [SamplingParams(temperature=0.8, top_p=0.95, seed=100 + index) for index in range(count)],
    }


def _cell(sampling: str, compared: str, plain: Sequence[Text], other: Sequence[Text]) -> dict[str, Any]:
    found = differences(plain, other)
    return {
        "sampling": sampling,
        "compared": compared,
        "num_texts": len(plain),
        "num_equal": len(plain) - len(found),
        "num_ties": sum(difference.is_tie for difference in found),
        "num_accepted_tokens": sum(text.num_accepted for text in other),
        "differences": [asdict(difference) for difference in found],
    }
