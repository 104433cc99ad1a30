"""Routed experts in torch operators, for inference; see `paceline.model.experts`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from paceline.model.block import BlockShape
from paceline.model.device import Device
from paceline.model.experts import ExpertsWeights, route, sum_experts


class TorchExperts:
    """Experts with their weights packed for a device.

    Args:
        weights: of the experts.
        shape: of the block; has experts.
        device: where they run.
        packed: False keeps the plain weight layout.
    """

    def __init__(
        self, weights: ExpertsWeights, shape: BlockShape, device: Device, *, packed: bool = True
    ) -> None:
        assert shape.experts is not None
        where, bias, gate = device.torch_device, weights.correction_bias, weights.shared_gate
        self._shape, self._is_gelu = shape.experts, shape.activation != "silu"
        self._gate = weights.gate.to(where)
        self._bias = None if bias is None else bias.to(where)
        self._gate_up = [device.pack(one.weight, one.bias, packed=packed) for one in weights.gate_up]
        self._down = [device.pack(one.weight, one.bias, packed=packed) for one in weights.down]
        self.shared_gate = None if gate is None else device.pack(gate.weight, gate.bias, packed=packed)
        """Gate of the MLP that every row passes, `[n, hidden] -> [n, 1]`, or None."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed projections."""
        return sum(one.num_bytes for one in (*self._gate_up, *self._down))

    def __call__(self, rows: Tensor) -> Tensor:
        """The weighted sum of each row's experts, `[n, hidden] -> [n, hidden]`."""
        weights, chosen = route(rows, self._gate, self._bias, self._shape)
        return sum_experts(rows, weights, chosen, self._run)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        gate, up = self._gate_up[expert](rows).chunk(2, dim=-1)
        gated = F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)
        return self._down[expert](gated.mul_(up))
