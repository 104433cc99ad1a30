"""What pairs at each distance come to, as one document and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from rich.table import Table

from experiments.distance.runner import Pair


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The pairs of one distance.

    Returns:
        `speedup`, the median over pairs with the least and the most; `total`, the time of all plain generations over
        that of all with drafts; `middle_half`, the mean of the pairs between the quartiles, which a single slow
        second of the machine does not move; tokens a pass; and whether all texts were the plain ones.
    """
    ratios = sorted(pair.speedup for pair in pairs)
    quarter = len(ratios) // 4
    num_tokens = sum(len(pair.speculative.token_ids) for pair in pairs)
    return {
        "round_trip_ms": pairs[0].round_trip_ms,
        "speedup": round(median(ratios), 3),
        "speedup_min": round(ratios[0], 3),
        "speedup_max": round(ratios[-1], 3),
        "middle_half": round(fmean(ratios[quarter : len(ratios) - quarter]), 3),
        "total": round(
            sum(pair.plain.elapsed_s for pair in pairs) / sum(pair.speculative.elapsed_s for pair in pairs), 3
        ),
        "tokens_per_pass": round(num_tokens / sum(pair.speculative.num_passes for pair in pairs), 3),
        "identical": all(pair.plain.token_ids == pair.speculative.token_ids for pair in pairs),
        "num_pairs": len(pairs),
        "by_prompt": _by_prompt(pairs),
    }


def _by_prompt(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """For each prompt the median speed-up of its pairs, and tokens a pass."""
    found = {}
    for prompt_id in dict.fromkeys(pair.prompt_id for pair in pairs):
        own = [pair for pair in pairs if pair.prompt_id == prompt_id]
        found[prompt_id] = {
            "speedup": round(median(pair.speedup for pair in own), 3),
            "tokens_per_pass": round(
                sum(len(pair.speculative.token_ids) for pair in own)
                / sum(pair.speculative.num_passes for pair in own),
                3,
            ),
        }
    return found


def table(distances: Sequence[dict[str, Any]]) -> Table:
    """One line a distance."""
    rows = Table(title="speed with drafts over plain decoding on the verifier's own core")
    for heading in ("round trip", "median", "min to max", "total time", "tokens/pass", "texts"):
        rows.add_column(heading, justify="left" if heading == "texts" else "right")
    for one in distances:
        rows.add_row(
            f"{one['round_trip_ms']:g} ms",
            f"{one['speedup']:.3f}",
            f"{one['speedup_min']:.2f} to {one['speedup_max']:.2f}",
            f"{one['total']:.3f}",
            f"{one['tokens_per_pass']:.2f}",
            "same" if one["identical"] else "DIFFER",
        )
    return rows
