"""Stats and policies as rich tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from services.scheduler.commands.stats import CONTEXTS
from services.scheduler.subject import Subject


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
    if "peers" in stats:
        yield _peers(stats["peers"])
    if "acceptance_per_position" in stats or "drafters" in stats:
        yield _acceptance(stats)
    for drafter in stats.get("drafters", ()):
        yield _reliability(drafter)
    if "tenants" in stats:
        yield _tenants(stats["tenants"])


def policy_table(history: tuple[Mapping[str, Any], ...]) -> Table:
    """Policies, newest first, with their reasons."""
    columns = ("decided", "version", "length", "nodes", "wait", "ahead", "outcomes", "expected", "reason")
    table = Table(*columns, title="policy history, newest first", title_justify="left")
    for policy in history:
        table.add_row(
            str(policy.get("written_at", ""))[:19].replace("T", " "),
            str(policy.get("version", "")),
            str(policy.get("draft_length", "")),
            str(policy.get("max_nodes_per_sequence", "")),
            _ms(float(policy.get("wait_budget_us", 0)) / 1e6),
            str(policy.get("draft_ahead", "")),
            str(policy.get("num_outcomes", "")),
            f"{float(policy.get('expected_speedup', 0)):.2f}",
            str(policy.get("reason", "")),
        )
    return table


def _step(step: Mapping[str, Any]) -> Table:
    shift = "" if step["shift"] is None else f"; machine changed by {step['shift']:.2f}"
    table = Table(
        "rows",
        "samples",
        "as measured",
        *(f"1 sequence, {context} tokens of context" for context in CONTEXTS),
        title="step time"
        f" (+{step['per_context_token_s'] * 1e9:.0f} ns a context token,"
        f" +{step['per_sequence_s'] * 1e6:.0f} us a sequence{shift})",
        title_justify="left",
    )
    for row in step["rows"]:
        times = (row["measured_s"], *(row[f"at_{context}_s"] for context in CONTEXTS))
        table.add_row(str(row["rows"]), str(row["samples"]), *(_ms(time) for time in times))
    return table


def _draft(draft: Mapping[str, Any]) -> Table:
    table = Table(
        "draft steps",
        "sequences",
        "time",
        title=f"draft time, {draft['rounds']} rounds",
        title_justify="left",
    )
    for row in draft["lengths"]:
        table.add_row(str(row["draft_steps"]), str(row["sequences"]), _ms(row["seconds"]))
    return table


def _peers(peers: list[Mapping[str, Any]]) -> Table:
    table = Table(
        *("conductor", "drafter", "round trips", "p50", "p95", "queue p50", "queue p95"),
        title="round trip less the drafter's time, and wait at the drafter",
        title_justify="left",
    )
    for peer in peers:
        times = (
            peer[f"{name}_{quantile}_s"] for name in ("round_trip", "queue") for quantile in ("p50", "p95")
        )
        table.add_row(
            peer["conductor"] or "-",
            peer["drafter"] or "-",
            str(peer["round_trips"]),
            *(_ms(t) for t in times),
        )
    return table


def _acceptance(stats: Mapping[str, Any]) -> Table:
    rows = [("passes", stats.get("acceptance_per_position", []))]
    rows += [(one["drafter"], one["acceptance_per_position"]) for one in stats.get("drafters", ())]
    depth = max(len(rates) for _, rates in rows)
    table = Table(
        "",
        *(str(position) for position in range(1, depth + 1)),
        title="acceptance by position, given all before it",
        title_justify="left",
    )
    for name, rates in rows:
        table.add_row(name, *(f"{rate:.0%}" for rate in rates))
    return table


def _reliability(drafter: Mapping[str, Any]) -> Table:
    table = Table(
        *("confidence", "accepted", "trials", "", "calibrated", "accepted", "trials"),
        title=f"{drafter['drafter']}: calibration error {drafter['own_error']:.1%} before,"
        f" {drafter['calibrated_error']:.1%} after",
        title_justify="left",
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
    table = Table(
        "tenant", "requests", "tokens", "tokens/s", "acceptance", title="tenants", title_justify="left"
    )
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
