"""``paceline checkpoints``: import and export of public drafter checkpoints, and cutting of vocabularies.

The commands over :mod:`paceline.checkpoints`. They name no format. :mod:`paceline.cli.app` imports this file only when
a command is called, because it needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.checkpoints import export_checkpoint, import_checkpoint, reduce_checkpoint
from paceline.contract.errors import InvalidRequestError
from paceline.methods.registry import METHODS
from paceline.models import resolve

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Import and export public drafter checkpoints, and cut their vocabularies.",
)

_NAMES = ", ".join(sorted({name for method in METHODS.values() for name in method.layouts}))


@app.command("import")
def import_(
    directory: Annotated[Path, typer.Argument(help="Directory of the public checkpoint.")],
    target: Annotated[str, typer.Option(help="The target it was made for: a model's name, or a directory.")],
    output: Annotated[Path, typer.Option(help="Directory to write.")],
    format: Annotated[
        str | None, typer.Option(help=f"Its format ({_NAMES}); by default config.json shows it.")
    ] = None,
    tap_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers whose entering streams are read, such as 2,15,27, if the file's ids mean something else."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A key of config.json that no reader knows and that changes nothing. Repeatable."),
    ] = None,
) -> None:
    """Turn a public checkpoint into one that Paceline serves."""
    layers = None if tap_layers is None else _layers(tap_layers)
    config = import_checkpoint(directory, resolve(target), output, format, layers, ignore or ())
    typer.echo(
        f"{output}: {config.method} for {config.target_name}, reads layers {config.shape.get('tap_layers')}"
    )


@app.command("export")
def export(
    directory: Annotated[Path, typer.Argument(help="Directory of one of Paceline's checkpoints.")],
    format: Annotated[str, typer.Option(help=f"Format to write: {_NAMES}.")],
    output: Annotated[Path, typer.Option(help="Directory to write.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The target: its embedding is written too, for programs that load the drafter without it."
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="Name of the target for programs that load the drafter, such as a hub's id."),
    ] = None,
) -> None:
    """Write one of Paceline's checkpoints in a public format."""
    target_dir = None if target is None else resolve(target)
    config = export_checkpoint(directory, format, output, target_dir, verifier)
    typer.echo(f"{output}: {config.method} as {format}")


@app.command("reduce")
def reduce(
    directory: Annotated[Path, typer.Argument(help="Directory of one of Paceline's checkpoints.")],
    data_dir: Annotated[
        Path,
        typer.Option(
            help="Text of its target, as `paceline data` writes it: its most frequent tokens are kept."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory to write.")],
    draft_vocab: Annotated[int, typer.Option(min=1, help="Number of tokens to keep.")] = 7680,
) -> None:
    """Let a trained drafter propose only frequent tokens, so that less of its head is read."""
    found = reduce_checkpoint(directory, data_dir, output, draft_vocab)
    typer.echo(
        f"{output}: {found.method} proposes {found.num_kept:,} of {found.num_before:,} tokens, which are "
        f"{found.coverage:.2%} of {found.num_counted:,} counted in {data_dir}"
    )


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequestError("tap-layers", f"{text!r} is not a list of whole numbers") from None
