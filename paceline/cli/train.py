"""``paceline train``: trains a drafter for a target.

Responsible for: the command over :func:`paceline.training.trainer.run`. Deliberately does not know: any method. Called
by :mod:`paceline.cli.app`, which imports it only when it is called: it needs torch.
"""

from __future__ import annotations

import typer

from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.models import resolve
from paceline.training import trainer


def _run(options: trainer.TrainOptions) -> None:
    configure_cli_logs()
    result = trainer.run(options)
    if result is not None:
        typer.echo(str(result))


train = command_for(
    trainer.TrainOptions,
    _run,
    arguments=("method",),
    converters={"model_dir": resolve},
    help_text="Train a drafter; goes on from its last checkpoint.",
)
