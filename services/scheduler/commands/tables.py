"""Stats and policies as rich tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from services.scheduler.commands.stats import CONTEXTS
from services.scheduler.subject import Subject

_POSITIONS = 8


def title(subject: Subject) -> str:
    """A subject in one line."""
    drafting = f"{subject.method}, {subject.placement}" if subject.is_speculative else "no drafter"
    return f"{subject.model_label} · {subject.dtype} · {subject.device_name} · {drafting}"


def curve_tables(stats: Mapping[str, Any]) -> Iterator[Table]:
    """Tables of `curve_stats`; none for what was not measured."""
    if "step" in stats:
        yield _step(stats["step"])
    if "draft" in stats:
        yield _draft(stats["draft"])
    for peer in stats.get("peers", ()):
        yield _peers(peer)
    if "acceptance_per_position" in stats or "drafters" in stats:
        yield from _acceptance(stats)
    for drafter in stats.get("drafters", ()):
        yield _reliability(drafter)
    if "tenants" in stats:
        yield _tenants(stats["tenants"])


def policy_tables(history: tuple[Mapping[str, Any], ...]) -> Iterator[Table]:
    """Policies, newest first, and below them the reason of each."""
    columns = ("decided", "version", "length", "nodes", "wait ms", "ahead", "outcomes", "gain")
    table = _table("policy history, newest first", *columns)
    reasons = _table("reasons", "version", "reason")
    for policy in history:
        table.add_row(
            str(policy.get("written_at", ""))[:19].replace("T", " "),
            str(policy.get("version", "")),
            str(policy.get("draft_length", "")),
            str(policy.get("max_nodes_per_sequence", "")),
            f"{float(policy.get('wait_budget_us', 0)) / 1e3:.2f}",
            str(policy.get("draft_ahead", "")),
            str(policy.get("num_outcomes", "")),
            f"{float(policy.get('expected_speedup', 0)):.2f}",
        )
        reasons.add_row(str(policy.get("version", "")), str(policy.get("reason", "")))
    yield table
    yield reasons


def _table(title: str, *columns: str) -> Table:
    """An empty table without lines, for which 80 columns are enough."""
    return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)


def _step(step: Mapping[str, Any]) -> Table:
    shift = "" if step["shift"] is None else f"; machine changed by {step['shift']:.2f}"
    table = _table(
        "step time; the last columns are for one sequence with so many tokens of context"
        f" (+{step['per_context_token_s'] * 1e9:.0f} ns a context token,"
        f" +{step['per_sequence_s'] * 1e6:.0f} us a sequence{shift})",
        *("rows", "samples", "as measured"),
        *(f"{context} tokens" for context in CONTEXTS),
    )
    for row in step["rows"]:
        times = (row["measured_s"], *(row[f"at_{context}_s"] for context in CONTEXTS))
        table.add_row(str(row["rows"]), str(row["samples"]), *(_ms(time) for time in times))
    return table


def _draft(draft: Mapping[str, Any]) -> Table:
    table = _table(f"draft time, {draft['rounds']} rounds", "draft steps", "sequences", "time")
    for row in draft["lengths"]:
        table.add_row(str(row["draft_steps"]), str(row["sequences"]), _ms(row["seconds"]))
    return table


def _peers(peer: Mapping[str, Any]) -> Table:
    """Of one conductor and one drafter, whose addresses may be long."""
    table = _table(
        f"{peer['conductor'] or '-'} to {peer['drafter'] or '-'}, {peer['round_trips']} round trips, in ms",
        *("", "p50", "p95"),
    )
    for name, label in (
        ("round_trip", "round trip less the drafter's time"),
        ("queue", "wait at the drafter"),
    ):
        table.add_row(label, *(f"{peer[f'{name}_{quantile}_s'] * 1e3:.2f}" for quantile in ("p50", "p95")))
    return table


def _acceptance(stats: Mapping[str, Any]) -> Iterator[Table]:
    """A table for every eight positions."""
    rows = [("passes", stats.get("acceptance_per_position", []))]
    rows += [(one["drafter"], one["acceptance_per_position"]) for one in stats.get("drafters", ())]
    depth = max(len(rates) for _, rates in rows)
    for first in range(0, depth, _POSITIONS):
        positions = range(first, min(first + _POSITIONS, depth))
        table = _table("acceptance by position, given all before it")
        table.add_column("", overflow="fold")
        for position in positions:
            table.add_column(str(position + 1), no_wrap=True)
        for name, rates in rows:
            table.add_row(name, *(f"{rates[i]:.0%}" if i < len(rates) else "" for i in positions))
        yield table


def _reliability(drafter: Mapping[str, Any]) -> Table:
    table = _table(
        f"{drafter['drafter']}: calibration error {drafter['own_error']:.1%} before,"
        f" {drafter['calibrated_error']:.1%} after",
        *("confidence", "accepted", "trials", "", "calibrated", "accepted", "trials"),
    )
    own, calibrated = drafter["own_diagram"], drafter["calibrated_diagram"]
    for i in range(max(len(own), len(calibrated))):
        left, right = (
            (f"{d[i][0]:.2f}", f"{d[i][1]:.2f}", f"{d[i][2]:.0f}") if i < len(d) else ("", "", "")
            for d in (own, calibrated)
        )
        table.add_row(*left, "", *right)
    return table


def _tenants(tenants: list[Mapping[str, Any]]) -> Table:
    table = _table("tenants")
    table.add_column("tenant", overflow="fold")
    for heading in ("requests", "tokens", "tokens/s", "acceptance"):
        table.add_column(heading, no_wrap=True)
    for use in tenants:
        table.add_row(
            use["tenant"],
            str(use["num_requests"]),
            str(use["num_tokens"]),
            f"{use['tokens_per_s']:.1f}",
            f"{use['acceptance']:.0%}",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
