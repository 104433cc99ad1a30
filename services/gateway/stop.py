"""Stop texts: where a text ends, and how much of it may be shown before that is known.

Responsible for: cutting exactly before the first stop text, also when it is spread over tokens, and holding back text
that may be the start of one. Deliberately does not know: tokens, requests, why else a sequence ends.

Called by: :mod:`services.gateway.generation`, once per generation.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTextMatcher:
    """Watches a growing text for the first of several stop texts.

    The stop text that is complete first wins; of two complete at the same character, the longer one. So the cut
    depends on the text alone, not on the pieces in which it arrives.

    Attributes:
        matched: the stop text that was found, None so far.
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = tuple(stop_texts)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Adds text and returns what may be shown now. Nothing may be added after a match.

        Args:
            text: what the last tokens added.
            may_match: False lets stop texts pass that are complete within this text; one that only begins here may
                still match later.
        """
        assert self.matched is None, "text after the stop text"
        num_old = len(self._held)  # what was held back has no match in it that counts
        text = self._held + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop_texts
            if (at := text.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found and may_match:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Ends the text: what was held back did not become a stop text and is shown."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a start of ``stop``, less than the whole of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
