"""The benchmark's findings as one JSON document and as a table for people."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.bench.runner import SERVED_MODES, Measurements, Plan
from experiments.bench.sample import paired_ratio, summarise
from paceline import __version__

RATIOS = (
    ("colocated", "plain"),
    ("separate", "plain_one_core"),
    ("separate", "plain"),
    ("plain", "transformers"),
)


def make_report(
    plan: Plan, measured: Measurements, identical: bool, command: str, elapsed_s: float
) -> dict[str, Any]:
    """The document that `paceline bench --json` writes.

    Returns:
        A mapping with a summary for each mode, `identical` (fp32, plain against co-located and separate),
        `identical_fraction` (the same question generation by generation in the benchmark's own dtype), the ratios
        that matter, pair by pair, and how it was made.
    """
    by_mode = measured.by_mode
    report: dict[str, Any] = {mode: summarise(samples).as_dict() for mode, samples in by_mode.items()}
    pairs = [
        plain.token_ids == other.token_ids
        for mode in SERVED_MODES
        if mode != "plain"
        for plain, other in zip(by_mode["plain"], by_mode[mode], strict=True)
    ]
    report |= {
        "identical": identical,
        "identical_fraction": round(sum(pairs) / len(pairs), 4),
        "ratios": {f"{a}/{b}": paired_ratio(by_mode[a], by_mode[b]) for a, b in RATIOS},
        "model": plan.model_dir.name,
        "method": measured.method,
        "dtype": plan.dtype,
        "threads": plan.num_cores,
        "seed": 0,
        "max_tokens": plan.max_tokens,
        "rounds": plan.rounds,
        "prompts": [prompt.prompt_id for prompt in plan.prompts],
        "draft_length": plan.draft_length,
        "hold_us": plan.wait_budget_us,  # the key is older than the option's name, and scripts read it
        "max_nodes": plan.max_nodes,
        "lookup": plan.ngram_tokens,
        "commit": commit(),
        "version": __version__,
        "command": command,
        "machine": f"{processor()}, {plan.num_cores} cores",
        "elapsed_s": round(elapsed_s, 1),
    }
    return report


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    rows = Table(
        title=f"{report['model']}, {report['dtype']}, batch 1, greedy, {report['max_tokens']} tokens",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for heading in ("mode", "tokens/s", "min to max", "tokens/pass", "first token ms"):
        rows.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode in ("transformers", *SERVED_MODES):
        figures = report[mode]
        rows.add_row(
            mode,
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['tokens_per_s_min']:.1f} to {figures['tokens_per_s_max']:.1f}",
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['ttft_ms']:.0f}",
        )
    return rows


def commit() -> str:
    """The commit of the sources that run, "-dirty" where they were changed; empty outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip()


def processor() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
