"""Show what has been measured: step and draft times, round trips, acceptance and calibration."""

from __future__ import annotations

from services.scheduler.commands.options import (
    JsonPath,
    Model,
    Plot,
    Redis,
    Scheduler,
    TlsCa,
    TlsCert,
    TlsKey,
    known_subjects,
    write_json,
)


def curves(
    redis: Redis = None,
    scheduler: Scheduler = None,
    model: Model = "",
    json_path: JsonPath = None,
    plot: Plot = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show what has been measured: step and draft times, round trips, acceptance and calibration."""
    from rich.console import Console

    from services.scheduler.commands.stats import curve_stats
    from services.scheduler.commands.tables import curve_tables, title

    known = known_subjects(redis, scheduler, model, tls_ca, tls_cert, tls_key)
    if json_path is not None:
        write_json([{**one.to_dict(), "figures": curve_stats(one)} for one in known], json_path)
    if plot is not None:
        from services.scheduler.commands.picture import draw_curves

        draw_curves(known, plot)
    if json_path != "-":
        console = Console()
        for one in known:
            console.print(title(one.subject), style="bold", markup=False)
            for table in curve_tables(curve_stats(one)):
                console.print(table)
