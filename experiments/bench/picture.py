"""The benchmark as one picture: speed by mode, with the spread, and acceptance by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODES = ("transformers", "plain_one_core", "plain", "colocated", "separate")
LABELS = {
    "transformers": "transformers\n(all cores)",
    "plain_one_core": "plain\n(one core)",
    "plain": "plain\n(all cores)",
    "colocated": "co-located\n(all cores)",
    "separate": "separate\n(one core each)",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of a report to `path` (PNG or SVG by its suffix)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, acceptance) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    modes = [mode for mode in MODES if mode in report]
    medians = [report[mode]["tokens_per_s"] for mode in modes]
    low = [m - report[mode]["tokens_per_s_min"] for m, mode in zip(medians, modes, strict=True)]
    high = [report[mode]["tokens_per_s_max"] - m for m, mode in zip(medians, modes, strict=True)]
    colours = ["#9aa0a6", "#5f8dd3", "#3366aa", "#d9822b", "#2e8b57"]
    speed.bar([LABELS[m] for m in modes], medians, yerr=[low, high], capsize=4, color=colours[: len(modes)])
    for place, (mode, value) in enumerate(zip(modes, medians, strict=True)):
        speed.text(
            place, value, f"{report[mode]['tokens_per_pass']:.2f}/pass", ha="center", va="bottom", fontsize=8
        )
    speed.set_ylabel("tokens/s, median (bars: min to max)")
    speed.set_title(f"{report['model']}, {report['dtype']}, batch 1, greedy")
    speed.spines[["top", "right"]].set_visible(False)
    for mode, colour in (("colocated", "#d9822b"), ("separate", "#2e8b57")):
        rates = report.get(mode, {}).get("acceptance_per_position", [])
        acceptance.plot(
            range(1, len(rates) + 1), rates, marker="o", color=colour, label=LABELS[mode].split("\n")[0]
        )
    acceptance.set_ylim(0, 1)
    acceptance.set_xlabel("position in the draft")
    acceptance.set_ylabel("accepted / verified")
    acceptance.legend(frameon=False)
    acceptance.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
