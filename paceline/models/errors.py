"""Errors of finding, fetching and converting models. Raised by `paceline.models`."""

from __future__ import annotations

from paceline.contract.errors import PacelineError


class ModelError(PacelineError):
    """Base of everything `paceline.models` raises on purpose."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_UNAVAILABLE"


class UnknownModelError(ModelError):
    """Neither a model directory nor a name in the registry."""


class NotFetchedError(ModelError):
    """A known model that is not in the cache yet."""


class FetchError(ModelError):
    """The package could not be downloaded, or what came is not what the registry promises."""


class ConversionError(ModelError):
    """The weights could not be turned into a safetensors directory."""
