"""PARD's training objective: that of its rows, as it is (2504.18583)."""

from __future__ import annotations

from paceline.methods.pard.objective import PardObjective


class Pard1Objective(PardObjective):
    """Loss and acceptance of a PARD drafter."""

    method = "pard1"
