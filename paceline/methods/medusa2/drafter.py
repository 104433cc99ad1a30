"""Medusa-2 (Cai et al., 2401.10774): Medusa's heads on a target that was trained together with them.

The heads are served as those of Medusa-1. How they were trained differs (`paceline.methods.medusa2.objective`), and so
does their target: it is the tuned one, whose fingerprint the checkpoint names. Deploy heads and target as a pair.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.methods.medusa_heads.drafter import HeadsDrafter


class Medusa2Drafter(HeadsDrafter):
    """Drafts with heads that belong to a tuned target; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "medusa2"
