"""The numbers that `paceline curves` prints: one source for tables, JSON and picture."""

from __future__ import annotations

from typing import Any

from services.scheduler.commands.sources import Known

_LENGTHS = (1, 2, 4, 8)
_SEQUENCES = (1, 4)
CONTEXTS = (256, 2048)


def curve_stats(known: Known) -> dict[str, Any]:
    """The fitted curves of a subject; what was not measured is absent.

    Times are in seconds, fractions from 0 to 1.
    """
    measurements = known.measurements
    stats: dict[str, Any] = {}
    if measurements.curve.count:
        curve = measurements.curve.estimator()
        shift = curve.shift
        stats["step"] = {
            "samples": measurements.curve.count,
            "per_context_token_s": curve.per_context_token_s,
            "per_sequence_s": curve.per_sequence_s,
            "shift": None if shift is None else shift.factor,
            "rows": [
                {
                    "rows": rows,
                    "samples": count,
                    "measured_s": curve.seconds(rows),
                    **{f"at_{context}_s": curve.seconds(rows, 1, context) for context in CONTEXTS},
                }
                for rows, (count, _) in sorted(measurements.curve.buckets.items())
            ],
        }
    if measurements.draft_time.count:
        model = measurements.draft_time.estimator()
        stats["draft"] = {
            "rounds": measurements.draft_time.count,
            **model.coefficients._asdict(),
            "lengths": [
                {"draft_steps": k, "sequences": n, "seconds": model.seconds(k, n)}
                for n in _SEQUENCES
                for k in _LENGTHS
            ],
        }
    if measurements.network.pairs:
        stats["peers"] = [
            {
                "conductor": conductor,
                "drafter": drafter,
                **{
                    f"{name}_{quantile}_s": getattr(sketch, f"{quantile}_s")
                    for name, sketch in (("round_trip", pair.round_trip), ("queue", pair.queue))
                    for quantile in ("p50", "p95")
                },
                "round_trips": pair.round_trip.count,
            }
            for (conductor, drafter), pair in sorted(measurements.network.pairs.items())
        ]
    if measurements.acceptance.count:
        depth = len(measurements.acceptance.attempts)
        stats["acceptance_per_position"] = list(measurements.acceptance.estimator().rates(depth))
    if measurements.outcomes.drafters:
        stats["drafters"] = [
            {
                "drafter": name,
                "trials": tables.own.count,
                "acceptance_per_position": [rate for rate, _ in tables.own.by_position()],
                "own_error": tables.own.error,
                "calibrated_error": tables.calibrated.error,
                "own_diagram": tables.own.diagram(),
                "calibrated_diagram": tables.calibrated.diagram(),
            }
            for name, tables in sorted(measurements.outcomes.drafters.items())
        ]
    if measurements.tenants.count:
        stats["tenants"] = measurements.tenants.to_dict()["tenants"]
    return stats
