"""The metrics that a process serves, as experiments read them. Deliberately does not know: which of them matter."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 10.0


def read_page(url: str) -> str:
    """What is served there now.

    Raises:
        OSError: nothing answers.
    """
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        page: str = answer.read().decode()
    return page


def samples_of(page: str) -> Iterator[Sample]:
    """All samples, with their labels."""
    for family in text_string_to_metric_families(page):
        yield from family.samples
