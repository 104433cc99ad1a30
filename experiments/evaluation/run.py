"""An evaluation from beginning to end: target by target, drafter by drafter.

Responsible for the order, for what is in memory at a time (one target and one drafter), for writing the document after
each drafter and for going on with one. Called by `command.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bench.prompts import held_out_prompts
from experiments.evaluation import document as documents
from experiments.evaluation import latency
from experiments.evaluation.measure import Stage, measure
from experiments.evaluation.pairing import Entry
from experiments.evaluation.plan import Plan
from paceline.methods.checkpoint import CheckpointError
from paceline.target import configure_threads


def run(
    pairs: Mapping[Plan, Sequence[Entry]],
    command: str,
    *,
    threads: int,
    latency_repeats: int,
    path: Path | None,
    resume: bool,
    console: Console,
) -> dict[str, Any]:
    """Measure drafters; what came of it as a document.

    Args:
        pairs: drafters by plan; plans differ in their target alone.
        command: for people.
        threads: torch threads.
        latency_repeats: blocks of each length that are timed; 0 times none.
        path: file to write after each drafter.
        resume: keep what is in the file already, and measure the rest.
        console: for progress.

    Raises:
        CheckpointError: a drafter cannot be used, or one that may suit any target suits none of these.
        InvalidRequestError: the file to go on with was made with other settings.
    """
    configure_threads(threads)
    plans = list(pairs)
    prompts = held_out_prompts(plans[0].prompts_per_kind)
    document = documents.begin(plans[0], [prompt.kind for prompt in prompts], threads, command)
    if resume and path is not None and path.exists():
        document = documents.merge([documents.read(path), document])
    unsuited: dict[Path, CheckpointError] = {}
    suited: set[Path] = set()
    with console.status("") as status:
        for plan, entries in pairs.items():
            marks = documents.target_marks(plan)
            todo = [
                entry
                for entry in entries
                if not documents.holds(
                    document, marks, entry.name, entry.fingerprint, has_blocks=latency_repeats > 0
                )
            ]
            suited |= {entry.directory for entry in entries if entry not in todo}
            if not todo:
                continue
            stage = Stage.load(plan, prompts)
            for entry in todo:
                started = time.monotonic()
                try:
                    figures = _figures(plan, stage, entry, latency_repeats, status.update)
                except CheckpointError as error:
                    if not entry.suits_any:
                        raise
                    unsuited[entry.directory] = error
                    console.print(
                        f"left out: {entry.name} with {plan.model_dir.name}: {error}", highlight=False
                    )
                    continue
                suited.add(entry.directory)
                documents.add(document, documents.target_entry(plan, stage), figures)
                took = f"{entry.name} with {plan.model_dir.name}: {time.monotonic() - started:.0f} s"
                console.print(took, highlight=False, markup=False)
                if path is not None:
                    documents.write(path, document)
    for directory, reason in unsuited.items():
        if directory not in suited:
            raise reason
    return document


def _figures(
    plan: Plan, stage: Stage, entry: Entry, latency_repeats: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """A drafter's entry in the document. Nothing of the drafter stays in memory."""
    contestant = stage.enter(plan, entry.directory, entry.name)
    measure(plan, stage, contestant, progress)
    blocks = []
    if latency_repeats:
        blocks = latency.latency(plan, stage, contestant, latency_repeats, progress)
    return documents.drafter_entry(contestant, entry.fingerprint, blocks)
