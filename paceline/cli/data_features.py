"""``paceline data features``: adds the features that drafters learn from to text that was written without them.

Responsible for: the command over :func:`paceline.training.features.run`. Deliberately does not know: what is
computed. Called by :mod:`paceline.cli.data`, which imports it only when the command is called, because it needs
torch.
"""

from __future__ import annotations

from paceline.cli.counts import print_counts
from paceline.cli.dataclass_options import command_for
from paceline.cli.logs import configure_cli_logs
from paceline.models import resolve
from paceline.training.features import FeatureOptions, run


def _run(options: FeatureOptions) -> None:
    configure_cli_logs()
    print_counts(run(options))


data_features = command_for(
    FeatureOptions,
    _run,
    arguments=("model_dir", "data_dir"),
    converters={"model_dir": resolve},
    help_text="Run a target over text that it wrote, and add the features that drafters learn from to the shards.",
)
