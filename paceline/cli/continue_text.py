"""``paceline data continue``: training data that a target without a chat template writes itself.

Responsible for: the command over :func:`paceline.training.continuations.run`. Deliberately does not know: what
is written. Called by :mod:`paceline.cli.data`, which imports it only when the command is called, because it
needs torch.
"""

from __future__ import annotations

from paceline.cli.counts import print_counts
from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.models import resolve
from paceline.training.continuations import ContinueOptions, run


def _run(options: ContinueOptions) -> None:
    configure_cli_logs()
    print_counts(run(options))


continue_text = command_for(
    ContinueOptions,
    _run,
    arguments=("model_dir", "out_dir"),
    converters={"model_dir": resolve},
    help_text="Let a target without a chat template continue first words; resumes where it stopped.",
)
