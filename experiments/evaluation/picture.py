"""An evaluation as two pictures: a block's time over its length, and acceptance by position.

Responsible for what is drawn of a document (`document.py`), a panel for each target, and of acceptance for each
temperature too. A method has the same colour everywhere. Chains alone are drawn: depths of trees are no positions, and
their nodes are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.evaluation.report import heading
from paceline.methods.registry import METHODS

SPREAD = 0.4
"""Of one position's points along the axis, of which lines stand one apart."""

MIN_REACHED = 10
"""Passes that must have reached a position for its acceptance to be drawn."""

# One for each method: the first ten as everybody's plots have them, and three that stand apart from those.
COLOURS = (
    *(
        "#1f77b4",
        "#ff7f0e",
        "#2ca02c",
        "#d62728",
        "#9467bd",
        "#8c564b",
        "#e377c2",
        "#7f7f7f",
        "#bcbd22",
        "#17becf",
    ),
    *("#003f5c", "#f4b400", "#7a0177"),
)
MARKERS = "os^vDPX*<>ph8"
LINES = ("-", "--", ":", "-.")


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `acceptance.png`, and `latency.png` where blocks were timed; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "acceptance.png"]
    draw_acceptance(document, written[0])
    if any(drafter["latency"] for target in document["targets"] for drafter in target["drafters"]):
        written.append(folder / "latency.png")
        draw_latency(document, written[1])
    return written


def draw_acceptance(document: Mapping[str, Any], path: Path) -> None:
    """Share of the tokens at each position of a chain that were accepted, of those whose predecessors all were.

    Bars are the standard error of that share (`standard_error`), positions taken as independent.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    targets, temperatures = document["targets"], document["temperatures"]
    figure, panels = pyplot.subplots(
        len(targets),
        len(temperatures),
        figsize=(5 * len(temperatures) + 3, 4.5 * len(targets)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for row, target in zip(panels, targets, strict=True):
        for panel, temperature in zip(row, temperatures, strict=True):
            styles = _Styles()
            lines = [
                (drafter, result)
                for drafter in target["drafters"]
                for result in drafter["results"]
                if result["temperature"] == temperature and _is_chain(result["drafts"])
            ]
            for index, (drafter, result) in enumerate(lines):
                shift = SPREAD * ((index + 0.5) / len(lines) - 0.5)  # so that bars do not hide one another
                points = [one for one in result["acceptance"] if one["reached"] >= MIN_REACHED]
                panel.errorbar(
                    [one["position"] + shift for one in points],
                    [one["accepted"] / one["reached"] for one in points],
                    yerr=[standard_error(one["accepted"], one["reached"]) for one in points],
                    label=_label(drafter, result["drafts"]),
                    **styles.of(drafter["method"]),
                )
            panel.set_title(f"{target['name']}, T = {temperature:g}", fontsize=10)
            panel.set_ylim(0, 1)
            panel.xaxis.get_major_locator().set_params(integer=True)
            _tidy(panel)
        row[0].set_ylabel("accepted, given all before")
        _legend(row[-1])
    for panel in panels[-1]:
        panel.set_xlabel("position in the draft")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_latency(document: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of a chain over its length, on doubly logarithmic axes; bars reach from quartile to quartile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    targets = [target for target in document["targets"] if any(one["latency"] for one in target["drafters"])]
    figure, (row,) = pyplot.subplots(
        1, len(targets), figsize=(8 * len(targets), 5.5), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, target in zip(row, targets, strict=True):
        styles = _Styles()
        for drafter in target["drafters"]:
            for drafts in dict.fromkeys(one["drafts"] for one in drafter["latency"]):
                points = [
                    (one["length"], one["ms"])
                    for one in drafter["latency"]
                    if one["drafts"] == drafts and one["ms"] is not None and _is_chain(drafts)
                ]
                if not points:
                    continue
                middles = [ms["median"] for _, ms in points]
                panel.errorbar(
                    [length for length, _ in points],
                    middles,
                    yerr=[
                        [ms["median"] - ms["p25"] for _, ms in points],
                        [ms["p75"] - ms["median"] for _, ms in points],
                    ],
                    label=_label(drafter, drafts),
                    **styles.of(drafter["method"]),
                )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xticks([1, 2, 3, 4, 6, 8, 12, 16])
        panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        panel.set_title(heading(target), fontsize=10)
        panel.set_xlabel("tokens in a block")
        _tidy(panel)
        _legend(panel)
    row[0].set_ylabel("ms a block, median and quartiles")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def standard_error(accepted: int, reached: int) -> float:
    """Of a share, with one success and one failure more than counted: none or all accepted does not mean certain."""
    share = (accepted + 1) / (reached + 2)
    return float((share * (1 - share) / reached) ** 0.5)


class _Styles:
    """Lines of one panel: colour and marker by method; drafters of one method differ in their strokes."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def of(self, method: str) -> dict[str, Any]:
        index, again = list(METHODS).index(method), self._seen.get(method, 0)
        self._seen[method] = again + 1
        return {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES[again % len(LINES)],
            "linewidth": 1.4,
            "markersize": 5,
            "capsize": 2,
            "elinewidth": 0.8,
        }


def _is_chain(drafts: str) -> bool:
    return drafts.startswith("chain")


def _label(drafter: Mapping[str, Any], drafts: str) -> str:
    parts = [drafter["name"]]
    if drafter["name"] != drafter["method"]:
        parts.append(f"({drafter['method']})")
    return " ".join(parts) + drafts.removeprefix("chain")


def _legend(panel: Any) -> None:
    """Beside the panel, in the order of the lines' ends."""
    handles, labels = panel.get_legend_handles_labels()
    if not labels:
        return
    ends = [
        float(handle.lines[0].get_ydata()[-1]) if len(handle.lines[0].get_ydata()) else -1.0
        for handle in handles
    ]
    order: Iterable[int] = sorted(range(len(ends)), key=lambda index: -ends[index])
    pairs = [(handles[index], labels[index]) for index in order]
    panel.legend(
        [handle for handle, _ in pairs],
        [label for _, label in pairs],
        frameon=False,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )


def _tidy(panel: Any) -> None:
    panel.grid(color="#e3e3e3", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
