"""Curves and policies as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.scheduling.durations import sketch_bounds
from services.scheduler.commands.sources import Known
from services.scheduler.commands.stats import CONTEXTS, curve_stats
from services.scheduler.commands.tables import title

_COLOURS = ("#3366aa", "#d9822b", "#2e8b57", "#9aa0a6")


def draw_curves(all_known: Sequence[Known], path: Path) -> None:
    """Draw the curves, one row of plots for each subject. The suffix of ``path`` chooses PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(all_known), 5, figsize=(22, 4 * len(all_known)), squeeze=False, layout="constrained"
    )
    for known, (step, draft, waits, positions, reliability) in zip(all_known, rows, strict=True):
        stats = curve_stats(known)
        step.set_title(title(known.subject), loc="left", fontsize=8)
        _draw_steps(step, stats)
        _draw_drafts(draft, stats)
        _draw_waits(waits, known)
        _draw_positions(positions, stats)
        _draw_reliability(reliability, stats)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_policies(all_known: Sequence[Known], path: Path) -> None:
    """Draw the policies over time, one plot for each subject, with their reasons below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(all_known), 1, figsize=(12, 4 * len(all_known)), squeeze=False, layout="constrained"
    )
    for known, (axes,) in zip(all_known, rows, strict=True):
        oldest_first = [*reversed(known.history)]
        indices = range(len(oldest_first))
        for name, colour in (("draft_length", _COLOURS[0]), ("max_nodes_per_sequence", _COLOURS[1])):
            values = [policy.get(name, 0) for policy in oldest_first]
            axes.step(indices, values, where="post", marker="o", color=colour, label=name.replace("_", " "))
        labels = [f"{str(p.get('written_at', ''))[11:19]}\n{p.get('reason', '')[:40]}" for p in oldest_first]
        axes.set_xticks(indices, labels, rotation=60, ha="right", fontsize=6)
        axes.set_title(title(known.subject), loc="left", fontsize=8)
        if oldest_first:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_steps(axes: Any, stats: Mapping[str, Any]) -> None:
    _label(axes, "rows of a step", "ms")
    rows = stats.get("step", {}).get("rows", ())
    xs = [row["rows"] for row in rows]
    if xs:
        axes.plot(xs, [row["measured_s"] * 1e3 for row in rows], "o-", color=_COLOURS[0], label="as measured")
    for context, colour in zip(CONTEXTS, _COLOURS[1:], strict=False):
        if xs:
            times = [row[f"at_{context}_s"] * 1e3 for row in rows]
            axes.plot(xs, times, "--", color=colour, label=f"1 sequence, context {context}")
    _legend(axes)


def _draw_drafts(axes: Any, stats: Mapping[str, Any]) -> None:
    _label(axes, "draft steps", "ms")
    lengths = stats.get("draft", {}).get("lengths", ())
    for index, n in enumerate(sorted({row["sequences"] for row in lengths})):
        of_n = [row for row in lengths if row["sequences"] == n]
        axes.plot(
            [row["draft_steps"] for row in of_n],
            [row["seconds"] * 1e3 for row in of_n],
            "o-",
            color=_COLOURS[index % 4],
            label=f"{n} sequences",
        )
    _legend(axes)


def _draw_waits(axes: Any, known: Known) -> None:
    _label(axes, "ms", "fraction not longer")
    axes.set_xscale("log")
    for index, ((_, drafter), pair) in enumerate(sorted(known.measurements.network.pairs.items())[:4]):
        for sketch, style, name in ((pair.round_trip, "-", "round trip"), (pair.queue, ":", "queue")):
            total, reached = sketch.weight, 0.0
            xs, ys = [], []
            for bucket, weight in sorted(sketch.buckets.items()):
                reached += weight
                xs.append(sketch_bounds(bucket)[1] * 1e3)
                ys.append(reached / total)
            if xs:
                axes.step(xs, ys, style, where="post", color=_COLOURS[index], label=f"{name} {drafter or ''}")
    _legend(axes)


def _draw_positions(axes: Any, stats: Mapping[str, Any]) -> None:
    _label(axes, "position in the draft", "accepted, given all before it")
    axes.set_ylim(0, 1)
    curves = [("passes", stats.get("acceptance_per_position", ()))]
    curves += [(one["drafter"], one["acceptance_per_position"]) for one in stats.get("drafters", ())]
    for index, (name, rates) in enumerate(curves):
        if rates:
            axes.plot(range(1, len(rates) + 1), rates, "o-", color=_COLOURS[index % 4], label=name)
    _legend(axes)


def _draw_reliability(axes: Any, stats: Mapping[str, Any]) -> None:
    _label(axes, "confidence", "accepted")
    axes.plot((0, 1), (0, 1), color="#cccccc", linewidth=1)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    for index, drafter in enumerate(stats.get("drafters", ())):
        for name, style in (("own", ":"), ("calibrated", "-")):
            points = drafter[f"{name}_diagram"]
            axes.plot(
                [confidence for confidence, _, _ in points],
                [accepted for _, accepted, _ in points],
                style,
                marker="o",
                markersize=3,
                color=_COLOURS[index % 4],
                label=f"{drafter['drafter']}, {name}: error {drafter[f'{name}_error']:.1%}",
            )
    _legend(axes)


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)
