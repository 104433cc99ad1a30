"""Command line: `python -m experiments.equality --json FILE`."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from experiments.bench.prompts import embedded_prompts
from experiments.equality.comparison import Plan, measure
from experiments.equality.configurations import configurations
from paceline.atomic_write import write_json
from paceline.methods.loading import default_drafter
from paceline.models import resolve


def main() -> None:
    """Run every configuration and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m experiments.equality", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--model", default="smollm2-135m", help="name of a fetched model")
    parser.add_argument("--prompts", type=int, default=8, help="how many of the embedded prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--only", default="", help="only configurations whose name contains this")
    given = parser.parse_args()
    console = Console(stderr=True)
    model_dir = resolve(given.model)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    plan = Plan(
        model_dir=model_dir,
        drafter_dir=default_drafter(given.model),
        prompts=[tokenizer.encode(prompt.text).ids for prompt in embedded_prompts(given.prompts)],
        num_tokens=given.max_tokens,
        num_threads=given.threads,
    )
    report: dict[str, Any] = {
        "command": " ".join(sys.argv[1:]),
        "model": given.model,
        "machine": platform.processor() or platform.machine(),
        "num_prompts": len(plan.prompts),
        "num_tokens": plan.num_tokens,
        "num_threads": plan.num_threads,
        "configurations": [],
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    for configuration in configurations():
        if given.only in configuration.name:
            report["configurations"].append(measure(plan, configuration, console.print))
            write_json(given.json, report)  # what there is, should the rest not end
    Console().print(markdown(report), markup=False, highlight=False, soft_wrap=True)


def markdown(report: dict[str, Any]) -> str:
    """The table of docs/invariance.md: equal texts, and in brackets those that differ at a tie."""
    compared: list[str] = []
    for cell in report["configurations"][0]["cells"]:
        if cell["compared"] not in compared:
            compared.append(cell["compared"])
    heads = [*(f"{name}" for name in compared), "earliest difference", "plain step, ms", "drafted step, ms"]
    lines = ["| run | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for measured in report["configurations"]:
        cells = measured["cells"]
        counts = [_count([cell for cell in cells if cell["compared"] == name]) for name in compared]
        found = [difference for cell in cells for difference in cell["differences"]]
        first = min(found, key=lambda difference: difference["place"], default=None)
        where = "none" if first is None else f"token {first['place']}, gap {first['gap']:.2g}"
        times = [f"{measured[name]:.1f}" for name in ("plain_step_ms", "drafted_step_ms")]
        lines.append("| " + " | ".join([measured["configuration"], *counts, where, *times]) + " |")
    return "\n".join(lines)


def _count(cells: list[dict[str, Any]]) -> str:
    texts, equal, ties = (
        sum(cell[name] for cell in cells) for name in ("num_texts", "num_equal", "num_ties")
    )
    return f"{equal} of {texts}" + (f" ({ties} tied)" if ties else "")


if __name__ == "__main__":
    main()
