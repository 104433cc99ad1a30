"""``paceline data``: the group of commands about training data.

Responsible for: the table of its commands. Deliberately does not know: what they do. They need torch, and are
imported when they are called. Called by :mod:`paceline.cli.app`.
"""

from __future__ import annotations

import typer

from paceline.cli.lazy import LazyCommand, LazyGroup


class DataGroup(LazyGroup):
    """Commands about training data."""

    table = {  # noqa: RUF012 (a constant, read through the base class)
        "continue": LazyCommand(
            "paceline.cli.continue_text",
            "continue_text",
            "Let a target without a chat template write text for training.",
        ),
        "features": LazyCommand(
            "paceline.cli.data_features",
            "data_features",
            "Add the target's features to text that was written without them.",
        ),
        "synth": LazyCommand("paceline.cli.synth", "synth", "Let a target write conversations for training."),
    }
    takes_plug_ins = False


app = typer.Typer(cls=DataGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def data() -> None:
    """Write training data with the target itself."""
