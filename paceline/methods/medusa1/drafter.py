"""Medusa-1 (Cai et al., 2401.10774): heads on a frozen target's last hidden state."""

from __future__ import annotations

from typing import ClassVar

from paceline.methods.medusa_heads.drafter import HeadsDrafter


class Medusa1Drafter(HeadsDrafter):
    """Drafts with heads on a frozen target; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "medusa1"
