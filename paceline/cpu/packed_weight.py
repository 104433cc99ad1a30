"""Weights in the order in which the CPU kernels read them.

A panel holds 32 columns of a weight side by side, so that a product reads memory from one end to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cpu import kernels

PANEL_COLUMNS = 32


def num_panels(columns: int) -> int:
    """Panels that so many columns of a weight fill."""
    return -(-columns // PANEL_COLUMNS)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[out_width, in_width]` in panels; with a gate, `out_width` counts gated columns."""

    panels: Tensor
    bias: Tensor | None
    in_width: int
    out_width: int
    is_gated: bool

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> PackedWeight:
        """Reorder a bfloat16 weight `[columns, in_width]`; a gated one holds all gates, then what they gate."""
        library = kernels.load()
        assert library is not None
        assert weight.dtype == torch.bfloat16
        columns, in_width = weight.shape
        if in_width % 16 or (is_gated and columns % PANEL_COLUMNS):
            raise ValueError(
                f"a weight {list(weight.shape)} does not fill panels: its rows need a multiple of 16 numbers, gated "
                f"weights a multiple of {PANEL_COLUMNS} columns"
            )
        source = weight.contiguous()
        panels = torch.empty(num_panels(columns) * PANEL_COLUMNS * in_width, dtype=torch.bfloat16)
        library.pl_pack(source.data_ptr(), columns, in_width, int(is_gated), panels.data_ptr())
        if bias is not None:
            bias = bias.float()
            if is_gated:
                bias = bias.view(2, -1, 16).transpose(0, 1).flatten()
            bias = torch.nn.functional.pad(bias, (0, -columns % PANEL_COLUMNS)).contiguous()
        return cls(panels, bias, in_width, columns // 2 if is_gated else columns, is_gated)
