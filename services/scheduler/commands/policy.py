"""Show the policies that were published, and the reasons for them."""

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


def policy(
    redis: Redis = None,
    scheduler: Scheduler = None,
    model: Model = "",
    json_path: JsonPath = None,
    plot: Plot = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the policies that were published, and the reasons for them."""
    from dataclasses import asdict

    from rich.console import Console

    from services.scheduler.commands.tables import policy_tables, title

    known = known_subjects(redis, scheduler, model, tls_ca, tls_cert, tls_key)
    if json_path is not None:
        write_json(
            [
                {"key": asdict(one.subject), "policy": one.policy, "history": list(one.history)}
                for one in known
            ],
            json_path,
        )
    if plot is not None:
        from services.scheduler.commands.picture import draw_policies

        draw_policies(known, plot)
    if json_path != "-":
        console = Console()
        for one in known:
            console.print(title(one.subject), style="bold", markup=False)
            if one.policy is not None:
                console.print(f"in force: {one.policy['reason']}")
            for table in policy_tables(one.history):
                console.print(table)
