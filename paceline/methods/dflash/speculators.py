"""DFlash in the speculators format."""

from __future__ import annotations

from paceline.methods.block_diffusion.layer import dflash_shapes
from paceline.methods.block_diffusion.speculators import (
    num_block_drafts,
    read_block_fields,
    write_block_fields,
)
from paceline.methods.speculators.kind import TapKind

KIND = TapKind(
    name="dflash",
    method="dflash",
    architecture="DFlashDraftModel",
    shapes=dflash_shapes,
    read_fields=read_block_fields,
    write_fields=write_block_fields,
    num_drafts=num_block_drafts,
    is_block=True,
)
