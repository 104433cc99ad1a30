"""Errors of data making and training. Raised here, shown by the command line; knows nothing else."""

from __future__ import annotations

from paceline.contract.errors import PacelineError


class TrainingError(PacelineError):
    """Anything that stops data making or training for a reason the user can act on."""

    reason = "TRAINING_STOPPED"


class TrainingDataError(TrainingError):
    """A model directory, shard, manifest or checkpoint does not hold what it should."""


class ExportRefusedError(TrainingError):
    """What stands now must not be served; says why. Training goes on."""

    reason = "EXPORT_REFUSED"
