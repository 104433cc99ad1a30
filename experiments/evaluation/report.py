"""An evaluation as tables for people, and as the tables that docs/methods/README.md shows.

Responsible for words and numbers of a document (`document.py`). Deliberately does not know: how it came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

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


_COLUMNS = 5
"""Depths, or lengths, side by side."""

LENGTHS = (1, 2, 4, 8, 16)
"""Of the blocks that the Markdown shows times of."""


def rows_of(target: Mapping[str, Any]) -> list[list[str]]:
    """A row for each of a target's drafters, ways and temperatures, in the order of `HEADS`."""
    rows = []
    for drafter in target["drafters"]:
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


def tables(target: Mapping[str, Any]) -> list[Table]:
    """For people: of each of a target's drafters what it comes to, and its acceptance by depth; medians alone."""
    shown = []
    for drafter in target["drafters"]:
        worth = _table(
            f"{drafter['name']} ({drafter['method']}; trained on: {_training(drafter['training'])}); "
            "to drafter, to target: bytes a cycle"
        )
        for head in (
            "drafts",
            "T",
            "tokens/pass",
            "draft ms",
            "speed",
            "to drafter",
            "to target",
            "same text",
        ):
            worth.add_column(head, justify="left" if head == "drafts" else "right", no_wrap=True)
        for result in drafter["results"]:
            sizes = result["bytes"]
            worth.add_row(
                result["drafts"],
                f"{result['temperature']:g}",
                f"{result['tokens_per_pass']:.2f} ± {result['standard_error']:.2f}",
                _median(result["draft_ms"]),
                _median(result["speed"]),
                _number(sizes["to_drafter_per_cycle"], ",.0f"),
                _number(sizes["to_target_per_cycle"], ",.0f"),
                _same(result),
            )
        shown += [worth, *_acceptance(drafter)]
    rows = _blocks(target)
    lengths = sorted({length for _, by_length in rows for length in by_length})
    for first in range(0, len(lengths), _COLUMNS):
        blocks = _table("ms a block, by its length")
        blocks.add_column("drafter", overflow="fold")
        for length in lengths[first : first + _COLUMNS]:
            blocks.add_column(str(length), justify="right", no_wrap=True)
        for name, by_length in rows:
            times = (by_length.get(length) for length in lengths[first : first + _COLUMNS])
            blocks.add_row(name, *map(_median, times))
        shown.append(blocks)
    return shown


def _acceptance(drafter: Mapping[str, Any]) -> Iterator[Table]:
    """Acceptance by depth: a table for every few depths."""
    depth = max(len(result["acceptance"]) for result in drafter["results"])
    for first in range(0, depth, _COLUMNS):
        depths = range(first, min(first + _COLUMNS, depth))
        table = _table("accepted at depth, and given the one before")
        for head in ("drafts", "T", *(str(place + 1) for place in depths)):
            table.add_column(head, justify="left" if head == "drafts" else "right", no_wrap=True)
        for result in drafter["results"]:
            table.add_row(
                result["drafts"],
                f"{result['temperature']:g}",
                *(
                    f"{row['unconditional']:.2f} {_number(row['conditional'], '.2f')}"
                    for row in result["acceptance"][first : first + _COLUMNS]
                ),
            )
        yield table


def _table(title: str) -> Table:
    """An empty table without lines, for which 80 columns are enough."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def markdown(document: Mapping[str, Any]) -> str:
    """The tables as Markdown, one for each target under its name, and what was measured how."""
    lines = [*(f"`{command}`" for command in document["commands"]), "", caption(document)]
    for target in document["targets"]:
        lines += ["", f"#### {heading(target)}", ""]
        lines += [
            "| " + " | ".join(HEADS) + " |",
            "|---|---|---|---:|---:|---|---|---:|---:|---:|---:|---:|---|",
            *("| " + " | ".join(row) + " |" for row in rows_of(target)),
        ]
        blocks = _blocks(target)
        if blocks:
            lines += ["", "| ms a block of length | " + " | ".join(map(str, LENGTHS)) + " |"]
            lines += ["|---|" + "---:|" * len(LENGTHS)]
            for head, by_length in blocks:
                cells = (_spread(by_length.get(length), ".2f") for length in LENGTHS)
                lines.append(f"| {head} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _blocks(target: Mapping[str, Any]) -> list[tuple[str, dict[int, dict[str, float] | None]]]:
    """Times of blocks by length, for each drafter and way, with a name."""
    return [
        (
            f"{drafter['name']}, {name}",
            {r["length"]: r["ms"] for r in drafter["latency"] if r["drafts"] == name},
        )
        for drafter in target["drafters"]
        for name in dict.fromkeys(row["drafts"] for row in drafter["latency"])
    ]


def caption(document: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    prompts = ", ".join(f"{count} {kind}" for kind, count in document["prompts"].items())
    return "; ".join(
        (
            *document["machines"],
            f"prompts: {prompts}, rounds: {document['rounds']}, up to {document['max_tokens']} tokens",
            f"{document['draft_length']} tokens in a row, {document['max_nodes']} nodes in a tree",
            f"{document['mode']} above T = 0, seed {document['seed']}",
        )
    )


def heading(target: Mapping[str, Any]) -> str:
    """A target's name, and how it ran."""
    return f"{target['name']} in {target['dtype']} on {target['device']}"


def differing(document: Mapping[str, Any]) -> Iterator[str]:
    """Names of what changed the text."""
    for target in document["targets"]:
        for drafter in target["drafters"]:
            for result in drafter["results"]:
                if result["compared"] and result["identical"] < result["compared"]:
                    way = f"{drafter['name']}, {result['drafts']}, T = {result['temperature']:g}"
                    yield f"{target['name']}: {way}"


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
