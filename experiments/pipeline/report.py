"""The experiment's findings as one JSON document and as a table for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from experiments.bench.report import commit, processor
from paceline import __version__


def make_report(arms: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The document that ``--json`` names.

    Args:
        arms: the figures of each.
        settings: how they were made.
    """
    return {
        **settings,
        "commit": commit(),
        "version": __version__,
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "arms": [dict(arm) for arm in arms],
    }


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The report for people: what was run, how fast that was, and where the time and the bytes went."""
    arms = report["arms"]
    runs = _table(
        f"step {report['step_curve']} ms, {report['rounds']} rounds of {report['max_tokens']} tokens"
    )
    for heading in ("run", "at once", "a", "c", "round trip", "cycle", "lengths"):
        runs.add_column(heading, no_wrap=True)
    speeds = _table("speed over plain: median (least to most)")
    for heading in ("run", "cycle", "speed", "without luck", "predicted", "same text"):
        speeds.add_column(heading, no_wrap=True)
    costs = _table("passes and bytes")
    for heading in ("run", "cycle", "tokens/pass", "ms/pass", "no wait", "hits", "bubble", "bytes/token"):
        costs.add_column(heading, no_wrap=True)
    for number, arm in enumerate(arms, 1):
        is_plain = arm["cycle"] == "plain"
        runs.add_row(
            str(number),
            str(arm["num_sequences"]),
            "" if is_plain else f"{arm['acceptance']:g}",
            "" if is_plain else f"{arm['cost']:g}",
            "" if is_plain else f"{arm['round_trip_ms']:g} ms ({arm['round_trip']:.2f} T)",
            arm["cycle"],
            "" if is_plain else _lengths(arm),
        )
        speeds.add_row(
            str(number),
            arm["cycle"],
            f"{arm['speedup']:.2f} ({arm['speedup_min']:.2f} to {arm['speedup_max']:.2f})",
            _figure(arm["without_luck"]),
            _figure(arm["predicted"]),
            "yes" if arm["identical"] else "NO",
        )
        costs.add_row(
            str(number),
            arm["cycle"],
            f"{arm['tokens_per_pass']:.2f}",
            f"{arm['ms_per_pass']:.1f}",
            f"{arm['at_once']:.0%}",
            "" if arm["hit_rate"] is None else f"{arm['hit_rate']:.0%}",
            f"{arm['bubble']:.0%}",
            f"{arm['bytes_per_token']:.0f}",
        )
    yield from (runs, speeds, costs)


def _table(title: str) -> Table:
    """An empty table without lines, for which 80 columns are enough."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


def _lengths(arm: Mapping[str, Any]) -> str:
    if arm["cycle"] == "planned":
        return f"{arm['over_best_fixed']:.2f} of the best"
    past = f" + {arm['draft_ahead']}" if arm["draft_ahead"] else ""
    outcomes = f" x {arm['outcomes']}" if arm["outcomes"] else ""
    return f"{arm['draft_length']}{past}{outcomes}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
