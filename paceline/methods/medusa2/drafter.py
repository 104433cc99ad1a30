"""Medusa-2 (Cai et al., 2401.10774): Medusa's heads beside a target that was tuned together with them.

The heads are served as those of Medusa-1 are; what differs is how they were trained
(`paceline.methods.medusa2.objective`), and
that their target is the tuned one, whose fingerprint the checkpoint names: heads and target are deployed as a pair.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.methods.medusa1.drafter import Medusa1Drafter


class Medusa2Drafter(Medusa1Drafter):
    """Drafts with heads that belong to a tuned target; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "medusa2"
