"""DFlash (2602.06036): a block of tokens from one pass of layers that attend to the target's features.

`block_drafter.py` runs blocks of the layer in `layer.py`. Rows of a block do not depend on one another's tokens. So a
chain takes the likeliest token of every row (in coupled mode the winner of the target's own race), a tree is the
product of the rows' distributions (`marginal_tree.py`), and draws come from each row's own distribution, which is sent
along.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from paceline.drafts import DraftEntry
from paceline.methods.block_diffusion.drafter import BlockDrafter, make_block_layer, read_shared
from paceline.methods.block_diffusion.layer import dflash_shapes
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.one_pass.round import RoundRequest, round_entries
from paceline.methods.target_vocabulary import read_draft_ids
from paceline.target import Device


class DFlashDrafter(BlockDrafter):
    """Drafts with one block of independent proposals; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "dflash"

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> DFlashDrafter:
        """Load a checkpoint; an embedding or head that it does not have comes from the target's directory.

        Raises:
            CheckpointError: sizes or tensors do not fit one another or the target.
        """
        with torch.inference_mode():
            tensors = load_tensors(directory, dflash_shapes(config))
            draft_ids = read_draft_ids(config, tensors["d2t"], device.torch_device)
            shared = read_shared(config, tensors, target_dir, draft_ids, device, dtype)
            return cls(
                make_block_layer(config, tensors, *shared, device, dtype),
                draft_ids,
                config.size("draft_vocab"),
                cls.read_tap(directory, config),
                config.size("max_positions"),
                device,
            )

    def _choose(self, wanted: Sequence[RoundRequest]) -> dict[int, DraftEntry]:
        return round_entries(wanted, self._draft_ids, self._target_id_of)
