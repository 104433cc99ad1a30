"""The table of commands.

Responsible for: the name, the module and one line of help of each. Deliberately does not know: what they do.
Called by :func:`paceline.cli.main`.
"""

from __future__ import annotations

import typer

from paceline.cli.lazy import LazyCommand, LazyGroup


class PacelineGroup(LazyGroup):
    """The built-in commands."""

    table = {  # noqa: RUF012 (a constant, read through the base class)
        "checkpoints": LazyCommand(
            "paceline.cli.checkpoints",
            "app",
            "Import and export public drafter checkpoints, and cut their vocabularies.",
        ),
        "data": LazyCommand("paceline.cli.data", "app", "Write training data with the target itself."),
        "doctor": LazyCommand(
            "paceline.cli.doctor", "doctor", "List what is missing on this machine and how to get it."
        ),
        "generate": LazyCommand(
            "paceline.cli.generate", "generate", "Generate text and print how fast it was."
        ),
        "methods": LazyCommand("paceline.cli.methods", "methods", "List the drafting methods."),
        "models": LazyCommand("paceline.cli.models", "app", "Fetch, list and find models."),
        "modes": LazyCommand("paceline.cli.modes", "modes", "List the verification modes."),
        "pretrain": LazyCommand(
            "paceline.cli.pretrain", "pretrain", "Train a small model together with its prediction modules."
        ),
        "train": LazyCommand("paceline.cli.train", "train", "Train a drafter for a target."),
        "up": LazyCommand("paceline.cli.up", "up", "Run everything on this machine until Ctrl-C."),
        "version": LazyCommand("paceline.cli.version", "version", "Print the version."),
    }


app = typer.Typer(
    cls=PacelineGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def paceline() -> None:
    """Exact speculative decoding with the drafter and the target apart."""
