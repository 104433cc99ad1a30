"""The benchmark's JSON document keeps its keys: scripts read them."""

from __future__ import annotations

from pathlib import Path

from experiments.bench.report import make_report
from experiments.bench.runner import SERVED_MODES, Measurements, Plan
from experiments.bench.sample import Sample

MODES = {"transformers", *SERVED_MODES}
SETTINGS = {"model", "method", "dtype", "threads", "seed", "max_tokens", "rounds", "prompts"}
FIXED = {"draft_length", "hold_us", "max_nodes", "lookup"}
FOUND = {"identical", "identical_fraction", "ratios"}


def test_the_keys_of_the_document_stay() -> None:
    measured = Measurements()
    for mode in MODES:
        measured.add(mode, Sample((1, 2), elapsed_s=1.0, ttft_s=0.5, num_passes=2))
    plan = Plan(
        Path("m"),
        Path("d"),
        "float32",
        [],
        max_tokens=2,
        rounds=1,
        num_cores=2,
        wait_budget_us=7,
        ngram_tokens=3,
    )
    report = make_report(plan, measured, identical=True, command="paceline bench", elapsed_s=1.0)
    assert report.keys() >= MODES | SETTINGS | FIXED | FOUND
    assert (report["hold_us"], report["lookup"]) == (7, 3)
