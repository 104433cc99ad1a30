"""Stop texts: where a text ends, and how much of it may be sent before that is known.

Responsible for: cutting exactly before the first stop text, also when it is spread over tokens, and keeping
back text that may be the start of one. Deliberately does not know: tokens, requests, other reasons for a
sequence to end.

Called by: :mod:`services.gateway.generation`, once per generation.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTextMatcher:
    """Watches a growing text for the first of several stop texts.

    The stop text that is complete first wins; of two that are complete at the same character, the longer one.
    So the cut depends on the text alone, not on the pieces in which it arrives.

    Attributes:
        matched: the stop text that was found; None until then.
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = tuple(stop_texts)
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Adds text and returns what may be sent now. No text may be added after a match.

        Args:
            text: what the last tokens added.
            may_match: False ignores stop texts that are complete within this text. One that only begins here
                may match later.
        """
        assert self.matched is None, "text after the stop text"
        num_old = len(self._pending)  # the text kept back contains no match
        text = self._pending + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop_texts
            if (at := text.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found and may_match:
            _, at, self.matched = min(found)
            self._pending = ""
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._pending = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Ends the text and returns what was kept back, since it did not become a stop text."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
