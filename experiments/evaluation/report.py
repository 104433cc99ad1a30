"""An evaluation as one document, as a table for people, and as the table that docs/methods/README.md shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from experiments.bench.report import commit, processor
from experiments.evaluation.figures import figures_of
from experiments.evaluation.measure import Contestant, Stage
from experiments.evaluation.plan import Plan
from paceline import __version__
from paceline.drafters import METHODS

NOTHING = "–"
"""Stands where there is no figure."""

HEADS = (
    "drafter",
    "reads",
    "drafts",
    "T",
    "tokens/pass",
    "accepted at depth 1, 2, ...",
    "given the one before",
    "draft ms",
    "B/cycle to drafter",
    "B/cycle to target",
    "speed",
    "same text",
    "trained on",
)


def make_report(
    plan: Plan,
    stage: Stage,
    contestants: Sequence[Contestant],
    blocks: Sequence[list[dict[str, Any]]],
    threads: int,
    command: str,
) -> dict[str, Any]:
    """The document that `paceline evaluate --json` writes.

    Args:
        plan: the settings.
        stage: target and prompts.
        contestants: what `measure` gave.
        blocks: what `latency` gave for each of them; empty lists where it was not asked for.
        threads: torch threads.
        command: for people.
    """
    return {
        "command": command,
        "version": __version__,
        "commit": commit(),
        "machine": f"{processor()}, {threads} threads",
        "model": plan.model_dir.name,
        "dtype": plan.dtype,
        "device": plan.device,
        "executor": type(stage.engine.executor).__name__,
        "prompts": dict(Counter(kind for kind, _ in stage.prompts)),
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "draft_length": plan.draft_length,
        "max_nodes": plan.max_nodes,
        "mode": plan.mode.value,
        "seed": plan.seed,
        "drafters": [
            {
                "name": contestant.name,
                "method": contestant.config.method,
                "reads": METHODS[contestant.config.method].reads,
                "num_bytes": sum(file.stat().st_size for file in contestant.directory.rglob("*.safetensors")),
                "training": {
                    name: contestant.config.training.get(name) for name in ("tokens", "steps", "seconds")
                },
                "results": [figures_of(way) for way in contestant.ways],
                "latency": found,
            }
            for contestant, found in zip(contestants, blocks, strict=True)
        ],
    }


def rows_of(report: dict[str, Any]) -> list[list[str]]:
    """A row for each drafter, way and temperature, in the order of `HEADS`."""
    rows = []
    for drafter in report["drafters"]:
        for result in drafter["results"]:
            acceptance, sizes = result["acceptance"], result["bytes"]
            rows.append(
                [
                    f"{drafter['name']} ({drafter['method']})",
                    drafter["reads"],
                    result["drafts"],
                    f"{result['temperature']:g}",
                    f"{result['tokens_per_pass']:.2f} ± {result['standard_error']:.2f}",
                    " ".join(f"{row['unconditional']:.2f}" for row in acceptance) or NOTHING,
                    " ".join(_number(row["conditional"], ".2f") for row in acceptance) or NOTHING,
                    _spread(result["draft_ms"], ".2f"),
                    _number(sizes["to_drafter_per_cycle"], ",.0f"),
                    _number(sizes["to_target_per_cycle"], ",.0f"),
                    _spread(result["speed"], ".2f"),
                    _same(result),
                    _training(drafter["training"]),
                ]
            )
    return rows


def tables(report: dict[str, Any]) -> list[Table]:
    """For people: of each drafter what it comes to, and its acceptance by depth; medians alone."""
    shown = []
    for drafter in report["drafters"]:
        worth = Table(
            title=f"{drafter['name']} ({drafter['method']}; trained on: {_training(drafter['training'])})"
        )
        depth = max(len(result["acceptance"]) for result in drafter["results"])
        accepted = Table(title="accepted at depth, and given the one before")
        ways = ("drafts", "T")
        for head in (*ways, "tokens/pass", "draft ms", "speed", "B to drafter", "B to target", "same text"):
            worth.add_column(head, justify="left" if head == "drafts" else "right")
        for head in (*ways, *(str(place + 1) for place in range(depth))):
            accepted.add_column(head, justify="left" if head == "drafts" else "right")
        for result in drafter["results"]:
            way, sizes = (result["drafts"], f"{result['temperature']:g}"), result["bytes"]
            worth.add_row(
                *way,
                f"{result['tokens_per_pass']:.2f} ± {result['standard_error']:.2f}",
                _median(result["draft_ms"]),
                _median(result["speed"]),
                _number(sizes["to_drafter_per_cycle"], ",.0f"),
                _number(sizes["to_target_per_cycle"], ",.0f"),
                _same(result),
            )
            accepted.add_row(
                *way,
                *(
                    f"{row['unconditional']:.2f} {_number(row['conditional'], '.2f')}"
                    for row in result["acceptance"]
                ),
            )
        shown += [worth, accepted]
    return shown


def latency_table(report: dict[str, Any]) -> Table:
    """Milliseconds of a block by its length."""
    columns = _blocks(report)
    shown = Table(title="ms a block, by its length")
    shown.add_column("length", justify="right")
    for head, _ in columns:
        shown.add_column(head, justify="right")
    for length in sorted({length for _, by_length in columns for length in by_length}):
        shown.add_row(str(length), *(_median(by_length.get(length)) for _, by_length in columns))
    return shown


def markdown(report: dict[str, Any]) -> str:
    """The table as Markdown, and what was measured how."""
    lines = [
        f"`{report['command']}`",
        "",
        caption(report),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|---|---|---:|---:|---|---|---:|---:|---:|---:|---:|---|",
        *("| " + " | ".join(row) + " |" for row in rows_of(report)),
    ]
    lengths = [1, 2, 4, 8, 16]
    blocks = _blocks(report)
    if blocks:
        lines += ["", "| ms a block of length | " + " | ".join(map(str, lengths)) + " |"]
        lines += ["|---|" + "---:|" * len(lengths)]
        for head, by_length in blocks:
            cells = (_spread(by_length.get(length), ".2f") for length in lengths)
            lines.append(f"| {head} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _blocks(report: dict[str, Any]) -> list[tuple[str, dict[int, dict[str, float] | None]]]:
    """Times of blocks by length, for each drafter and way, with a name."""
    return [
        (
            f"{drafter['name']}, {name}",
            {r["length"]: r["ms"] for r in drafter["latency"] if r["drafts"] == name},
        )
        for drafter in report["drafters"]
        for name in dict.fromkeys(row["drafts"] for row in drafter["latency"])
    ]


def caption(report: dict[str, Any]) -> str:
    """What was measured, in a line."""
    prompts = ", ".join(f"{count} {kind}" for kind, count in report["prompts"].items())
    return "; ".join(
        (
            f"{report['model']} in {report['dtype']} on {report['machine']}",
            f"prompts: {prompts}, rounds: {report['rounds']}, up to {report['max_tokens']} tokens",
            f"{report['draft_length']} tokens in a row, {report['max_nodes']} nodes in a tree",
            f"{report['mode']} above T = 0, seed {report['seed']}",
        )
    )


def _same(result: dict[str, Any]) -> str:
    return f"{result['identical']} of {result['compared']}" if result["compared"] else NOTHING


def _median(found: dict[str, float] | None) -> str:
    return NOTHING if found is None else f"{found['median']:.2f}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _spread(found: dict[str, float] | None, form: str) -> str:
    if found is None:
        return NOTHING
    return f"{found['median']:{form}} ({found['p25']:{form}} to {found['p75']:{form}})"


def _training(facts: dict[str, Any]) -> str:
    """Tokens and time; a checkpoint need not say either."""
    parts = []
    if isinstance(facts.get("tokens"), int):
        parts.append(f"{facts['tokens'] / 1e6:.1f} M tokens")
    if isinstance(facts.get("seconds"), int | float):
        parts.append(f"{facts['seconds'] / 3600:.1f} h")
    return ", ".join(parts) or NOTHING
