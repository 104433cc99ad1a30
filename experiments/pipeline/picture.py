"""The experiment as one picture: speed over the round trip, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"synchronous": "#3366aa", "ahead": "#d9822b", "enumerate": "#2e8b57", "planned": "#8a4fa3"}
LINES = ("-", "--", ":", "-.")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report to `path` (PNG or SVG by its suffix); one panel for each number of sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [arm for arm in report["arms"] if arm["cycle"] != "plain"]
    counts = sorted({arm["num_sequences"] for arm in arms})
    points = sorted({(arm["acceptance"], arm["cost"]) for arm in arms})
    figure, panels = pyplot.subplots(
        1, max(1, len(counts)), figsize=(6 * max(1, len(counts)), 4.5), squeeze=False, sharey=True
    )
    for panel, count in zip(panels[0], counts, strict=False):
        panel.axhline(1.0, color="#9aa0a6", linewidth=1)
        for point, line in zip(points, [LINES[i % len(LINES)] for i in range(len(points))], strict=True):
            for cycle, colour in COLOURS.items():
                chosen = sorted(
                    (
                        arm
                        for arm in arms
                        if (arm["num_sequences"], arm["cycle"]) == (count, cycle)
                        and (arm["acceptance"], arm["cost"]) == point
                    ),
                    key=lambda arm: float(arm["round_trip"]),
                )
                if not chosen:
                    continue
                places = [arm["round_trip"] for arm in chosen]
                speeds = [arm["speedup"] for arm in chosen]
                low = [arm["speedup"] - arm["speedup_min"] for arm in chosen]
                high = [arm["speedup_max"] - arm["speedup"] for arm in chosen]
                label = f"{cycle}, a={point[0]:g}, c={point[1]:g}"
                panel.errorbar(
                    places,
                    speeds,
                    yerr=[low, high],
                    color=colour,
                    linestyle=line,
                    marker="o",
                    capsize=3,
                    label=label,
                )
                known = [
                    (arm["round_trip"], arm["predicted"]) for arm in chosen if arm["predicted"] is not None
                ]
                panel.plot(
                    *zip(*known, strict=True), color=colour, linestyle="none", marker="x"
                ) if known else None
        panel.set_title(f"{count} at once" if count > 1 else "one sequence")
        panel.set_xlabel("round trip / plain step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("speed over plain decoding (x: predicted)")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
