"""What objectives share whose drafter reads fused taps of the target and proposes a part of its vocabulary.

Responsible for the parameters, for what was measured on the text (draft vocabulary, tap scale), and for the served form
of both. Knows no loss; EAGLE-3, P-EAGLE and the block drafters build on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from paceline.training.draft_vocabulary import draft_ids_of, id_offsets
from paceline.training.objective import DrafterObjective, checked_parameters


class TapObjective(DrafterObjective):
    """Parameters and constants of an objective over fused taps.

    Args:
        expected: shape of every parameter by checkpoint name, ``fc.weight`` among them.
        parameters: float32 parameters by checkpoint name.
        target_head: the target's head ``[target_vocab, target_hidden]``, frozen.
        draft_ids: target id of every draft id, ascending, int64 ``[draft_vocab]``.
        tap_scale: float32 ``[taps_width]`` that taps are divided by; the export folds it into ``fc``.
        dtype: compute type; parameters stay float32.
    """

    method: str
    in_tap_units: ClassVar[tuple[str, ...]] = ()
    """Parameters that replace taps: trained in scaled units, served in the taps' own."""

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, Tensor],
        target_head: Tensor,
        draft_ids: Tensor,
        tap_scale: Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(checked_parameters(self.method, expected, parameters), dtype)
        self._whole_head = target_head
        self.set_constants({"draft_ids": draft_ids, "tap_scale": tap_scale})

    def constants(self) -> dict[str, Tensor]:
        """The draft vocabulary and the tap scale, both measured on the text."""
        return {"draft_ids": self.draft_ids, "tap_scale": self._tap_scale}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Sets draft vocabulary and tap scale."""
        self.draft_ids = constants["draft_ids"]
        self._tap_scale = constants["tap_scale"].float()
        self._taps_gain = (1.0 / self._tap_scale).to(self.dtype)
        self._target_head = self._whole_head[self.draft_ids].to(self.dtype)  # [draft_vocab, target_hidden]
        self._draft_of = draft_ids_of(self.draft_ids, len(self._whole_head))

    def tensors(self) -> dict[str, Tensor]:
        """The servable checkpoint: bfloat16 by public name, tap scale folded in, and the id maps."""
        out = {k: p.detach().clone() for k, p in self._parameters.items()}
        out["fc.weight"] /= self._tap_scale
        for name in self.in_tap_units:
            out[name] *= self._tap_scale
        out = {k: v.bfloat16() for k, v in out.items()}
        out["d2t"] = id_offsets(self.draft_ids)
        out["t2d"] = self._draft_of >= 0
        return out
