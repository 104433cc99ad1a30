"""From passes to figures. Pure.

Responsible for: what is counted, and over which passes: a prompt's own pass, for which nothing can be drafted, counts
nowhere. Deliberately does not know: how figures are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from experiments.decoding.generation import Pass
from experiments.decoding.tally import Tally
from experiments.evaluation.measure import Generation, Way
from paceline.sampling.verify import FinalKind


def figures_of(way: Way) -> dict[str, Any]:
    """All figures of one way to draft, as plain data.

    Returns:
        Counts that depend on seeds alone (`tokens_per_pass`, `by_kind`, `acceptance`, `bytes`, `identical`), and times
        (`draft_ms`, `verify_ms`, `speed`, `tokens_per_s`).
    """
    passes = [one for generation in way.generations for one in generation.passes[1:]]
    tally = tally_of(passes)
    kinds = sorted({generation.kind for generation in way.generations})
    by_kind = {
        kind: round(
            tally_of([p for g in way.generations if g.kind == kind for p in g.passes[1:]]).tokens_per_pass, 4
        )
        for kind in kinds
    }
    return {
        "temperature": way.temperature,
        "drafts": way.arm.name,
        "mode": way.arm.mode.value,
        "exact": way.arm.mode.is_exact,
        "num_passes": tally.num_passes,
        "num_tokens": tally.num_tokens,
        "tokens_per_pass": round(tally.tokens_per_pass, 4),
        "standard_error": round(tally.standard_error, 4),
        "by_kind": by_kind,
        "acceptance": acceptance(passes),
        "bytes": num_bytes(way.generations),
        "identical": way.num_identical if way.is_comparable else None,
        "compared": len(way.generations) if way.is_comparable else 0,
        "draft_ms": spread([1e3 * one.draft_s for one in passes if one.draft is not None]),
        "verify_ms": spread([1e3 * one.verify_s for one in passes]),
        "speed": spread(
            [
                _token_s(plain) / _token_s(drafted)
                for drafted, plain in zip(way.generations, way.plain, strict=True)
                if drafted.num_decoded and plain.num_decoded
            ]
        ),
        "tokens_per_s": {
            name: round(median(1 / _token_s(one) for one in generations if one.num_decoded), 2)
            if any(one.num_decoded for one in generations)
            else None
            for name, generations in (("drafted", way.generations), ("plain", way.plain))
        },
    }


def tally_of(passes: Sequence[Pass]) -> Tally:
    """Counts over passes."""
    tally = Tally()
    for one in passes:
        tally.add(one)
    return tally


def acceptance(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """Acceptance by depth in the draft, from 1.

    Returns:
        For each depth `drafted`, the passes that verified a token there; `reached`, those that accepted all tokens
        before it and verified one behind them; and `accepted`. `unconditional` is the share of all passes with a draft
        that accepted so far, so that its sum over depths is the mean number of accepted tokens; `conditional` the share
        of those that reached it, None where none did.
    """
    depth = max((max(one.tree.depths, default=0) for one in passes), default=0)
    num_drafts = sum(len(one.tree) > 0 for one in passes)
    rows = []
    for place in range(1, depth + 1):
        drafted = sum(place in one.tree.depths for one in passes)
        reached = sum(_num_reached(one) >= place for one in passes)
        accepted = sum(one.num_accepted >= place for one in passes)
        rows.append(
            {
                "position": place,
                "drafted": drafted,
                "reached": reached,
                "accepted": accepted,
                "unconditional": round(accepted / num_drafts, 4),
                "conditional": round(accepted / reached, 4) if reached else None,
            }
        )
    return rows


def _num_reached(one: Pass) -> int:
    """Depths at which the pass held a drafted token behind the accepted ones against the target's choice."""
    is_cut = len(one.tokens) <= len(one.verdict.accepted_tokens)  # the text ended within the draft
    return one.num_accepted + (one.verdict.kind is FinalKind.RECOVERED and not is_cut)


def num_bytes(generations: Sequence[Generation]) -> dict[str, float | None]:
    """What a cycle sends, framing included, and a position's features alone; means over cycles behind the prompt."""
    cycles = [one for generation in generations for one in generation.passes[1:] if one.num_bytes_to_drafter]
    sent = [one for generation in generations for one in generation.passes if one.draft is not None]
    positions = sum(len(one.verdict.kept_rows) for one in cycles)
    return {
        "to_drafter_per_cycle": _mean([one.num_bytes_to_drafter for one in cycles]),
        "to_target_per_cycle": _mean([one.num_draft_bytes for one in sent]),
        "features_per_token": round(sum(one.num_feature_bytes for one in cycles) / positions, 2)
        if positions
        else None,
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles, smallest and largest; None of nothing."""
    if not values:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    found = {"median": median(values), "p25": low, "p75": high, "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()} | {"count": len(values)}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def _token_s(generation: Generation) -> float:
    """Seconds a token behind the prompt's pass."""
    return generation.decode_s / generation.num_decoded
