"""The figures of the modes as a Markdown table."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    """One row for each arm: tokens per pass at every temperature, acceptance by depth at the last, bytes per token.

    Args:
        report: what `python -m experiments.modes` writes as JSON.
    """
    temperatures = sorted({row["temperature"] for row in report["results"]})
    heads = [
        "drafts",
        "exact",
        *(f"T = {t:g}" for t in temperatures),
        "accepted at depth 1, 2, ...",
        "bytes/token",
    ]
    lines = [
        f"`{report['command']}`",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|---|" + "---:|" * len(temperatures) + "---|---:|",
    ]
    for name in dict.fromkeys(row["arm"] for row in report["results"]):
        rows = {row["temperature"]: row for row in report["results"] if row["arm"] == name}
        last = rows[max(rows)]
        cells = [
            name,
            "yes" if last["exact"] else "no",
            *(
                f"{rows[t]['tokens_per_pass']:.2f} ± {rows[t]['standard_error']:.2f}" if t in rows else ""
                for t in temperatures
            ),
            " ".join(f"{a:.2f}" for a in last["acceptance_per_position"]),
            f"{last['bytes_per_token']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
