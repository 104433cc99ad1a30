"""``paceline data synth``: training data that the target writes itself.

Responsible for: the command over :func:`paceline.training.synth.run`. Deliberately does not know: what is
written. Called by :mod:`paceline.cli.data`, which imports it only when the command is called, because it needs
torch.
"""

from __future__ import annotations

from paceline.cli.counts import print_counts
from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.models import resolve
from paceline.training.conversations import SynthOptions
from paceline.training.synth import run


def _run(options: SynthOptions) -> None:
    configure_cli_logs()
    print_counts(run(options))


synth = command_for(
    SynthOptions,
    _run,
    arguments=("model_dir", "out_dir"),
    converters={"model_dir": resolve},
    help_text="Let a target write conversations, and store what drafters learn from; resumes where it stopped.",
)
