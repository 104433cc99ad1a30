"""When bytes come out of one direction of a link.

Responsible for: the arithmetic of delay, jitter, bandwidth and stalls. Deliberately does not know: sockets, clocks.
Used by experiments.link.proxy.
"""

from __future__ import annotations

import random

from experiments.link.settings import LinkSettings


class Shaper:
    """One direction of one connection; times are seconds on any one clock.

    Args:
        settings: in force; may be replaced at any time, for bytes that come in from then on.
        started_s: stalls are counted from here.
        seed: of the jitter.
    """

    def __init__(self, settings: LinkSettings, started_s: float, seed: int) -> None:
        self.settings = settings
        self._started_s = started_s
        self._random = random.Random(seed)
        self._free_at_s = started_s  # when the wire has taken all earlier bytes
        self._last_s = started_s

    def release_at(self, arrived_s: float, num_bytes: int) -> float:
        """When bytes that came in at `arrived_s` come out: never before those that came in earlier."""
        settings = self.settings
        sent_s = arrived_s
        if settings.mbit_per_s:
            self._free_at_s = sent_s = (
                max(arrived_s, self._free_at_s) + num_bytes * 8e-6 / settings.mbit_per_s
            )
        out_s = sent_s + settings.delay_ms * 1e-3
        if settings.jitter_ms:
            out_s += self._random.expovariate(1e3 / settings.jitter_ms)
        if settings.stall_ms:
            num_stalls, into_s = divmod(out_s - self._started_s, settings.stall_every_s)
            if num_stalls >= 1 and into_s < settings.stall_ms * 1e-3:
                out_s += settings.stall_ms * 1e-3 - into_s
        self._last_s = max(self._last_s, out_s)
        return self._last_s
