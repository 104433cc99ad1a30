"""What a drafter reads from the target: hidden states of chosen layers, and cached keys and values of chosen layers.

A tap may fuse the hidden states by a projection. The drafter's checkpoint defines the tap, the engine evaluates it, and
verifier and drafter size frames from it. This file does not know drafters or transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.device import Device
from paceline.model.linear import Linear
from paceline.target.attention.planning import PlannedStep
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape
from paceline.target.kv.slot import Slot
from paceline.target.step import StepError


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer whose cached keys and values are read.

    Attributes:
        layer: of the target.
        num_kv_heads: its key heads.
        head_dim: their width.
        window: how many of the newest positions are read; 0 for all.
    """

    layer: int
    num_kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def width(self) -> int:
        """Numbers of a position: keys, then values, heads in order."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TapPart:
    """Columns of a tap's features that are read the same number of positions back.

    Attributes:
        width: how many.
        reach: newest positions of which they are read; 0 for all.
    """

    width: int
    reach: int


@dataclass(frozen=True, slots=True, eq=False)
class TapSpec:
    """Which hidden states, how they are fused, and which cached keys and values beside them.

    Attributes:
        layers: layer `i` means the residual stream entering layer `i`; `num_layers` is the one after the last
            layer, before the final norm.
        norm_final: append the output of the final norm (what the LM head reads).
        projection: `[width_out, num_sources * hidden]`, applied on the target's side; None sends the
            concatenation.
        last_only: the drafter reads only the newest position that a step commits, the one before the last committed
            token: one row a round. The engine still gives all rows, and whoever forwards features forwards that one.
        is_optional: the drafter can draft a whole sequence without features.
        cached: layers whose keys and values follow the hidden states. The hidden states are then read of the newest
            position alone.
    """

    layers: tuple[int, ...] = ()
    norm_final: bool = False
    projection: Tensor | None = None
    last_only: bool = False
    is_optional: bool = False
    cached: tuple[CachedLayer, ...] = ()

    @property
    def num_sources(self) -> int:
        """Hidden states concatenated before the projection."""
        return len(self.layers) + int(self.norm_final)

    def width(self, hidden_size: int) -> int:
        """Features per token."""
        return sum(part.width for part in self.parts(hidden_size))

    def parts(self, hidden_size: int) -> tuple[TapPart, ...]:
        """Columns of the features in order, by how far back they are read."""
        own = self.num_sources * hidden_size if self.projection is None else int(self.projection.shape[0])
        if not self.cached:
            return (TapPart(own, 0),)
        return (TapPart(own, 1), *(TapPart(layer.width, layer.window) for layer in self.cached))

    def check(self, shape: ModelShape) -> None:
        """Raise StepError unless the tap fits a model of this shape."""
        num_layers, hidden_size = shape.num_layers, shape.hidden_size
        if self.num_sources == 0:
            raise StepError("a tap needs at least one layer or the final norm")
        for layer in self.layers:
            if not 0 <= layer <= num_layers:
                raise StepError(f"tap layer {layer} is outside 0..{num_layers}")
        if self.projection is not None and (
            self.projection.ndim != 2 or self.projection.shape[1] != self.num_sources * hidden_size
        ):
            raise StepError(
                f"tap projection has shape {tuple(self.projection.shape)}, "
                f"expected [*, {self.num_sources * hidden_size}]"
            )
        if self.cached and (self.projection is not None or self.last_only):
            raise StepError("a tap of cached layers has neither a projection nor last_only")
        for cached in self.cached:
            if not 0 <= cached.layer < num_layers:
                raise StepError(f"tap of cached layer {cached.layer} is outside 0..{num_layers - 1}")
            heads = shape.heads(cached.layer)
            if (cached.num_kv_heads, cached.head_dim) != heads:
                raise StepError(
                    f"layer {cached.layer} has {heads[0]} key heads of width {heads[1]}, the tap expects "
                    f"{cached.num_kv_heads} of {cached.head_dim}"
                )
        if self.cached and all(cached.window for cached in self.cached):
            raise StepError("a tap of cached layers needs one that is read of all positions")


class Tap:
    """A tap made ready for one engine: the projection packed for its device."""

    def __init__(self, spec: TapSpec, device: Device, dtype: torch.dtype) -> None:
        self.spec = spec
        self._projection: Linear | None = (
            None if spec.projection is None else device.pack(spec.projection.to(dtype))
        )

    def join(self, streams: Mapping[int, Tensor], final: Tensor | None) -> Tensor:
        """Captured streams side by side, not projected yet.

        Args:
            streams: layer -> `[n, hidden]`.
            final: output of the final norm `[n, hidden]`, None where no tap asked for it.

        Returns:
            `[n, num_sources * hidden]` in the compute dtype.
        """
        parts = [streams[layer] for layer in self.spec.layers]
        if self.spec.norm_final:
            assert final is not None  # the engine captures what its taps name
            parts.append(final)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def project(self, joined: Tensor) -> Tensor:
        """What :meth:`join` gave as features `[n, width]`."""
        return joined if self._projection is None else self._projection(joined)

    def beside_cached(self, features: Tensor, slot: Slot, first: int) -> Tensor:
        """Features with the keys and values of the tap's cached layers behind them, copied: `[n, width]`.

        Args:
            features: `[n, num_sources * hidden]`.
            slot: holds the rows' keys and values.
            first: cache row of the first.
        """
        parts = [features]
        for cached in self.spec.cached:
            end = first + features.shape[0]
            both = torch.cat(slot.view(cached.layer, first, end), dim=1)[0]  # [2 * kv_heads, n, head_dim]
            parts.append(both.transpose(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Taps:
    """All taps of one engine.

    Args:
        shape: of the model.
        device: where it runs.
        dtype: of the projections' weights.
    """

    def __init__(self, shape: ModelShape, device: Device, dtype: torch.dtype) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._taps: list[Tap] = []

    @property
    def specs(self) -> list[TapSpec]:
        """In the order of their features."""
        return [tap.spec for tap in self._taps]

    def add(self, spec: TapSpec) -> int:
        """Add a tap; returns its index.

        Raises:
            StepError: it does not fit the model.
        """
        spec.check(self._shape)
        self._taps.append(Tap(spec, self._device, self._dtype))
        return len(self._taps) - 1

    def project(self, captured: Tensor, tap: int) -> Tensor:
        """Features `[n, width]` of rows that were captured and not projected."""
        return self._taps[tap].project(captured)

    def capture(self) -> frozenset[int]:
        """Residual streams that all taps together read from a step."""
        layers = {layer for tap in self._taps for layer in tap.spec.layers}
        return frozenset(layers | {FINAL_NORM for tap in self._taps if tap.spec.norm_final})

    def features(
        self, step: PlannedStep, wanted: Sequence[bool], result: ExecutorOutput, *, projected: bool
    ) -> list[list[Tensor]]:
        """Per tap, features `[n_i, width]` of each sequence, in the caller's order; no rows where none are wanted.

        Args:
            step: that was run.
            wanted: whether each sequence's features are wanted.
            result: of the step.
            projected: False leaves hidden states as they were captured.
        """
        return [self._split(tap, step, wanted, result, projected) for tap in self._taps]

    def _split(
        self, tap: Tap, step: PlannedStep, wanted: Sequence[bool], result: ExecutorOutput, projected: bool
    ) -> list[Tensor]:
        if not any(wanted):
            width = tap.spec.width(self._shape.hidden_size)
            dtype = self._device.compute_dtype(self._dtype)
            return [torch.empty((0, width), dtype=dtype, device=self._device.torch_device) for _ in wanted]
        features = tap.join(result.streams, result.final)
        if projected:
            features = tap.project(features)
        empty = F.pad(features[:0], (0, sum(cached.width for cached in tap.spec.cached)))
        parts = []
        for index, segment in step.segments:
            own = features[segment.first_row : segment.first_row + segment.num_rows]
            parts.append(tap.beside_cached(own, segment.slot, segment.past) if wanted[index] else empty)
        return step.in_batch_order(parts)
