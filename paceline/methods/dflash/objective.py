"""DFlash's training objective: that of its blocks, as it is (2602.06036, section 3.3)."""

from __future__ import annotations

from paceline.methods.block_diffusion.objective import BlockObjective


class DFlashObjective(BlockObjective):
    """Loss and acceptance of a DFlash drafter."""

    method = "dflash"
