"""PARD-2 (2605.08632): PARD with the target's features added to its embeddings, if a request wants them.

The token at position `i` is embedded as `Emb(x_i) + scale * target_proj(states of the target at i - 1)`: the states
that predicted it. Position 0 has no such states and adds a zero feature. It is kept in the text, because small
models rest their attention on it. Mask rows add the last true row's feature. `target_proj` runs on the target's side
(the tap's projection), so one vector of the drafter's width is sent for each committed token.

The model was trained on some texts without features. So it can also draft without them, as PARD does, and need not wait
for them (`DraftRequest.reads_features`). The cache is valid for one of the two ways: a sequence that changes from one
to the other is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor
from paceline.methods.drafter import DrafterError, DraftRequest
from paceline.methods.pard.checkpoint import PROJECTION, PROJECTION_BIAS
from paceline.methods.pard.drafter import PardDrafter, PardSequence, load_model
from paceline.methods.whole_model.draft_model import DraftModel
from paceline.target import Device, TapSpec


class FeatureRows:
    """Features of one sequence by position. All are kept, because a text may have to be run again.

    Args:
        width: width of a feature.
        dtype: type in which they are kept.
        where: device on which they are kept.
    """

    def __init__(self, width: int, dtype: torch.dtype, where: torch.device) -> None:
        self.count = 0
        self._rows = torch.empty(0, width, dtype=dtype, device=where)

    def append(self, features: Tensor) -> None:
        """Take in `[n, width]`."""
        end = self.count + features.shape[0]
        if end > self._rows.shape[0]:
            grown = self._rows.new_empty(max(end, 2 * self._rows.shape[0], 64), self._rows.shape[1])
            grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : end] = features
        self.count = end

    def part(self, first: int, end: int) -> Tensor:
        """Features of positions `first` to `end - 1`."""
        return self._rows[first:end]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How features are added to the embeddings.

    Attributes:
        tap: what is read from the target.
        scale: factor of what is added.
        bias: `[hidden]` of the projection, applied here because a tap's projection has no bias; None for none.
    """

    tap: TapSpec
    scale: float
    bias: Tensor | None

    @classmethod
    def read(cls, directory: Path, config: DrafterConfig) -> Fusion:
        """Read it from a checkpoint.

        Raises:
            CheckpointError: a field is out of range, or a tensor is missing or does not fit.
        """
        scale = config.shape.get("scale")
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not scale > 0:
            raise CheckpointError(f"shape.scale must be positive, not {scale!r}")
        layers = config.shape.get("tap_layers")
        if not isinstance(layers, list) or not all(
            isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers
        ):
            raise CheckpointError(f"shape.tap_layers must be a list of layers, not {layers!r}")
        norm_final = config.flag("norm_final")
        num_sources = len(layers) + norm_final
        weight = load_tensor(directory, PROJECTION)
        if (
            not num_sources
            or weight.ndim != 2
            or weight.shape[1] != num_sources * config.size("target_hidden")
        ):
            raise CheckpointError(
                f"{PROJECTION} is {list(weight.shape)}, which does not fit {num_sources} taps of "
                f"{config.size('target_hidden')}"
            )
        bias = load_tensor(directory, PROJECTION_BIAS) if config.flag("proj_bias") else None
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise CheckpointError(f"{PROJECTION_BIAS} is {list(bias.shape)}, not {[weight.shape[0]]}")
        return cls(
            TapSpec(layers=tuple(layers), norm_final=norm_final, projection=weight, is_optional=True),
            float(scale),
            bias,
        )


class Pard2Drafter(PardDrafter):
    """Drafts with mask tokens and, on request, features; see `paceline.methods.drafter.Drafter`.

    Args:
        model: as for `PardDrafter`.
        draft_ids: as for `PardDrafter`.
        mask: as for `PardDrafter`.
        fusion: which features are read, and how they are added.
    """

    method: ClassVar[str] = "pard2"

    def __init__(self, model: DraftModel, draft_ids: Tensor | None, mask: int, fusion: Fusion) -> None:
        super().__init__(model, draft_ids, mask)
        self.tap = fusion.tap
        self._scale = fusion.scale
        self._hidden = self._engine.shape.hidden_size
        where, dtype = self._engine.device.torch_device, self._engine.dtype
        self._bias = None if fusion.bias is None else fusion.bias.to(where, dtype)
        self._features: dict[int, FeatureRows] = {}  # by slot

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: the states of its layers, projected on the target's side."""
        return Fusion.read(directory, config).tap

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Pard2Drafter:
        """Load a checkpoint."""
        fusion = Fusion.read(directory, config)
        model, draft_ids, mask = load_model(directory, config, target_dir, device, dtype)
        assert fusion.tap.projection is not None
        if fusion.tap.projection.shape[0] != model.engine.shape.hidden_size:
            raise CheckpointError(
                f"{PROJECTION} gives {fusion.tap.projection.shape[0]} wide features to a model of "
                f"{model.engine.shape.hidden_size}"
            )
        return cls(model, draft_ids, mask, fusion)

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        super().open(sequence_id, tokens)
        slot = self._get(sequence_id).slot
        self._features[slot] = FeatureRows(self._hidden, self._engine.dtype, self._engine.device.torch_device)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        state = self._sequences.get(sequence_id)
        if state is not None:
            self._features.pop(state.slot, None)
        super().close(sequence_id)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features."""
        rows = self._features[self._get(sequence_id).slot]
        if rows.count < start:
            raise DrafterError(
                f"sequence {sequence_id}: features from {rows.count} to {start - 1} are missing"
            )
        if features.ndim != 2 or features.shape[1] != self._hidden:
            raise DrafterError(f"features must be [n, {self._hidden}], not {list(features.shape)}")
        rows.append(features[rows.count - start :])

    def _uses_features(self, request: DraftRequest) -> bool:
        return request.reads_features

    def _can_draft(self, request: DraftRequest) -> bool:
        if not super()._can_draft(request):
            return False
        state = self._get(request.sequence_id)
        return not request.reads_features or self._features[state.slot].count >= len(state.tokens) - 1

    def _added(self, state: PardSequence, num_true: int, num_masks: int) -> Tensor | None:
        if not state.with_features:
            return None
        rows, end = self._features[state.slot], len(state.tokens)
        added = torch.zeros(
            num_true + num_masks,
            self._hidden,
            dtype=self._engine.dtype,
            device=self._engine.device.torch_device,
        )
        # Position of the first row; the token there reads the states of the one before.
        first = end - num_true
        read = rows.part(max(0, first - 1), end - 1)
        added[num_true - read.shape[0] : num_true] = read
        if num_masks and end > 1:
            added[num_true:] = rows.part(end - 2, end - 1)
        if self._bias is not None:
            added += self._bias
        return added * self._scale
