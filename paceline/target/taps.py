"""What a drafter reads from the target: hidden states of chosen layers, perhaps fused by a projection.

Responsible for naming a tap and turning the captured residual streams into features. It does not know
drafters or transports. The drafter checkpoint defines a tap, the engine evaluates it, verifier and drafter
size frames from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.target.device import Device, Linear
from paceline.target.errors import StepError


@dataclass(frozen=True, slots=True, eq=False)
class TapSpec:
    """Which hidden states, and how they are fused.

    Attributes:
        layers: layer `i` means the residual stream entering layer `i`; `num_layers` is the one after the last
            layer, before the final norm.
        norm_final: append the output of the final norm (what the LM head reads).
        projection: `[width_out, num_sources * hidden]`, applied on the target's side; None sends the
            concatenation.
        last_only: of what a step commits only the newest position is read, the one before the last committed token: one
            row a round. The engine gives all rows as for other taps; who moves features on moves that one.
        is_optional: whoever reads them can also do without, for a whole sequence.
    """

    layers: tuple[int, ...] = ()
    norm_final: bool = False
    projection: Tensor | None = None
    last_only: bool = False
    is_optional: bool = False

    @property
    def num_sources(self) -> int:
        """Hidden states concatenated before the projection."""
        return len(self.layers) + int(self.norm_final)

    def width(self, hidden_size: int) -> int:
        """Features per token."""
        return self.num_sources * hidden_size if self.projection is None else int(self.projection.shape[0])

    def check(self, num_layers: int, hidden_size: int) -> None:
        """Raise StepError unless the tap fits a model of this shape."""
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
