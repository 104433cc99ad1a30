"""Medusa's heads (Cai et al., 2401.10774, "Medusa heads"): their sizes, tensors and forward pass.

Head `k`, counted from 0, reads the target's final hidden state of position `t` (after the final norm, what the LM head
reads) and predicts token `t + 2 + k`: residual blocks `z + silu(W z + b)`, then a linear map to a vocabulary.
The heads of several sequences are computed in one pass. Called by the drafter in this package and, for sizes and names,
by training and by the public layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.backend import RowMap, pack_rows
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.target_vocabulary import check_token_map
from paceline.target import Device

MAX_HEADS = 16
MAX_RANKS = 10
"""Tokens of each head that a tree may use (the paper's reference code takes ten)."""


class OutputHead(StrEnum):
    """Which linear map turns a block's output into logits."""

    OWN = "own"
    """One for each head (the paper's form): `lm_heads.{k}.weight`."""
    SHARED = "shared"
    """One for all heads, stored in the checkpoint: `lm_head.weight`."""
    TARGET = "target"
    """The target's own LM head, read from its directory and not stored in the checkpoint."""


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Sizes of the heads.

    Attributes:
        hidden: width of the target's hidden states.
        target_vocab: tokens of the target.
        draft_vocab: tokens that the heads can propose; fewer than the target's if `token_map` names them.
        num_heads: number of heads, which is the length of the longest draft.
        num_layers: residual blocks of each head.
        has_bias: whether blocks add a bias.
        output: where the heads' logits come from.
    """

    hidden: int
    target_vocab: int
    draft_vocab: int
    num_heads: int
    num_layers: int = 1
    has_bias: bool = True
    output: OutputHead = OutputHead.OWN

    @classmethod
    def from_config(cls, config: DrafterConfig) -> MedusaShape:
        """Read sizes from a checkpoint's configuration.

        Raises:
            CheckpointError: a size is missing or out of range.
        """
        sizes = ("hidden", "target_vocab", "draft_vocab", "num_heads", "num_layers")
        hidden, target_vocab, draft_vocab, num_heads, num_layers = (config.size(name) for name in sizes)
        has_bias, output = config.shape.get("has_bias", True), config.shape.get("output", OutputHead.OWN)
        if num_heads > MAX_HEADS:
            raise CheckpointError(f"shape.num_heads must be at most {MAX_HEADS}, not {num_heads}")
        if draft_vocab > target_vocab:
            raise CheckpointError("shape.draft_vocab must not be above shape.target_vocab")
        if not isinstance(has_bias, bool):
            raise CheckpointError(f"shape.has_bias must be true or false, not {has_bias!r}")
        if output not in tuple(OutputHead):
            raise CheckpointError(f"shape.output must be one of {', '.join(OutputHead)}, not {output!r}")
        return cls(hidden, target_vocab, draft_vocab, num_heads, num_layers, has_bias, OutputHead(output))

    @property
    def is_reduced(self) -> bool:
        """Whether the heads propose only a part of the vocabulary."""
        return self.draft_vocab < self.target_vocab

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by the names that vLLM gives them."""
        d = self.hidden
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(self.num_heads):
            for j in range(self.num_layers):
                shapes[f"blocks.{k}.layers.{j}.weight"] = (d, d)
                if self.has_bias:
                    shapes[f"blocks.{k}.layers.{j}.bias"] = (d,)
            if self.output is OutputHead.OWN:
                shapes[f"lm_heads.{k}.weight"] = (self.draft_vocab, d)
        if self.output is OutputHead.SHARED:
            shapes["lm_head.weight"] = (self.draft_vocab, d)
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Everything in a checkpoint: parameters, and the target id of each draft id of a reduced vocabulary."""
        shapes = self.parameter_shapes()
        if self.is_reduced:
            shapes["token_map"] = (self.draft_vocab,)
        return shapes

    def draft_ids(self, token_map: Tensor) -> Tensor:
        """The target's id of each draft id, int64 `[draft_vocab]`.

        Raises:
            CheckpointError: the map does not name distinct tokens of the target.
        """
        return check_token_map(token_map, self.draft_vocab, self.target_vocab)


class MedusaHeads:
    """The heads, packed for a device.

    Args:
        shape: sizes.
        tensors: by the names of `MedusaShape.parameter_shapes`.
        target_head: `[draft_vocab, hidden]`, rows of the target's LM head, if `shape.output` is the target's.
        device: where to run.
        dtype: compute type.
    """

    def __init__(
        self,
        shape: MedusaShape,
        tensors: Mapping[str, Tensor],
        target_head: Tensor | None,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.dtype, self.where = shape, dtype, device.torch_device
        heads = range(shape.num_heads)

        def part(k: int, j: int, name: str) -> Tensor:
            return tensors[f"blocks.{k}.layers.{j}.{name}"].to(dtype)

        # The first blocks of all heads read the same rows, so they are one product; later blocks read rows of their
        # own.
        first_bias = torch.cat([part(k, 0, "bias") for k in heads]) if shape.has_bias else None
        self._first = pack_rows(torch.cat([part(k, 0, "weight") for k in heads]), first_bias, device)
        self._later = [
            [
                pack_rows(part(k, j, "weight"), part(k, j, "bias") if shape.has_bias else None, device)
                for k in heads
            ]
            for j in range(1, shape.num_layers)
        ]
        if shape.output is OutputHead.OWN:
            weights = [tensors[f"lm_heads.{k}.weight"].to(dtype) for k in heads]
        else:  # one product for all heads
            shared = tensors["lm_head.weight"] if shape.output is OutputHead.SHARED else target_head
            assert shared is not None
            weights = [shared.to(dtype)]
        self._outputs: list[RowMap] = [pack_rows(weight, None, device, as_float=True) for weight in weights]

    def forward(self, hidden: Tensor, heads: range) -> Tensor:
        """Logits of some heads for every row.

        Output heads are most of what a pass reads, so only those of the requested heads are run.

        Args:
            hidden: `[n, hidden]` in the compute type.
            heads: indices of the heads to run, at least one.

        Returns:
            `[n, len(heads), draft_vocab]` float32.
        """
        n, width = hidden.shape
        first = F.silu(self._first(hidden)).view(n, self.shape.num_heads, width)
        states = hidden.unsqueeze(1) + first[:, heads.start : heads.stop]
        for layers in self._later:
            parts = [states[:, i] for i in range(len(heads))]
            parts = [x + F.silu(layers[k](x)) for k, x in zip(heads, parts, strict=True)]
            states = torch.stack(parts, dim=1)
        if self.shape.output is not OutputHead.OWN:
            logits = self._outputs[0](states.reshape(n * len(heads), width))
            return logits.view(n, len(heads), -1).float()
        columns = [self._outputs[k](states[:, i].contiguous()) for i, k in enumerate(heads)]
        return torch.stack(columns, dim=1).float()
