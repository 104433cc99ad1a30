"""Expected calibration error, kept online.

Responsible for: the decayed sums by confidence bin, and the error they give.

Deliberately does not know: tokens, positions, who calibrates.

Called by: `calibration.Calibrator`; experiments.
"""

from __future__ import annotations

import math

from paceline.scheduling.reliability import NUM_BINS, bin_of


class CalibrationError:
    """Expected calibration error over 20 fixed bins, decayed.

    Args:
        half_life: observations after which an old one counts half.

    Attributes:
        count: observations ever.
    """

    def __init__(self, half_life: float = 16384.0) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next observation. Growing weights equal decaying ones up to a factor.
        self._confidences = [0.0] * NUM_BINS
        self._accepted = [0.0] * NUM_BINS
        self._total = 0.0
        self.count = 0

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """Add one observation."""
        weight = self._weight
        bin_index = bin_of(confidence)
        self._confidences[bin_index] += weight * confidence
        self._accepted[bin_index] += weight * is_accepted
        self._total += weight
        self.count += 1
        self._weight = weight * self._growth
        if self._weight > 1e12:
            scale = 1.0 / self._weight
            self._confidences = [value * scale for value in self._confidences]
            self._accepted = [value * scale for value in self._accepted]
            self._total *= scale
            self._weight = 1.0

    @property
    def value(self) -> float:
        """From 0 to 1; 0 without observations."""
        if not self._total:
            return 0.0
        gaps = zip(self._confidences, self._accepted, strict=True)
        return math.fsum(abs(claimed - came) for claimed, came in gaps) / self._total
