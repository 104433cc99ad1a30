"""Logit biases as they are written on a command line.

Responsible for: entries of the form ID=VALUE. Deliberately does not know: ranges; the gateway checks them.
Called by ``paceline generate``.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.errors import InvalidRequestError


def read_biases(entries: Sequence[str]) -> dict[int, float]:
    """Biases by token id.

    Raises:
        InvalidRequestError: an entry has another form, or an id occurs twice.
    """
    biases: dict[int, float] = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            token_id, bias = int(token), float(value)
        except ValueError:
            raise InvalidRequestError(
                "sampling.logit_bias", f"{entry!r} is not of the form ID=VALUE"
            ) from None
        if token_id in biases:
            raise InvalidRequestError("sampling.logit_bias", f"token {token_id} is given twice")
        biases[token_id] = bias
    return biases
