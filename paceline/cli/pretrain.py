"""``paceline pretrain``: a small model and its multi-token prediction modules, trained together from nothing.

The command over :func:`paceline.methods.deepseek_mtp.pretrain.run`. :mod:`paceline.cli.app` imports it only when it is
called, because it needs torch.
"""

from __future__ import annotations

import typer

from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.methods.deepseek_mtp.pretrain import PretrainOptions, run
from paceline.models import resolve


def _run(options: PretrainOptions) -> None:
    configure_cli_logs()
    typer.echo(str(run(options)))


pretrain = command_for(
    PretrainOptions,
    _run,
    converters={"tokenizer_dir": resolve},
    help_text="Train a small model together with its prediction modules; continues from the newest checkpoint.",
)
