"""The EAGLE-1 draft layer on the CPU kernels; see `native_layer.py`. Called by `paceline.methods.eagle1.drafter`.

What a pass reads is mostly the target's head: for SmolLM2-135M 57 MB in bfloat16, 9 of 7,680 tokens, the layer itself 9
MB. It is read once for all rows of a pass, and only for the rows whose tokens are wanted.
"""

from __future__ import annotations

from paceline.cpu.draft_layer import NativeLayer, block_runs_natively
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Epilogue, Program
from paceline.methods.eagle1.layer import Eagle1Weights
from paceline.target import Device


def runs_natively(weights: Eagle1Weights, device: Device) -> bool:
    """Whether the kernels are here and take this layer."""
    return block_runs_natively(weights.block, device, ())


class NativeEagle1Layer(NativeLayer):
    """The layer as a program; see :class:`paceline.methods.draft_layer.DraftLayer`."""

    def __init__(self, weights: Eagle1Weights) -> None:
        block, width = weights.block, weights.block.hidden

        def enter(program: Program, states: int) -> tuple[int, int]:
            embedded, entered, joined = (program.buffer(width) for _ in range(3))
            of_embedding, of_feature = (part.contiguous() for part in weights.fc.split(width, dim=1))
            program.embed(weights.embedding.contiguous(), embedded)
            program.linear(embedded, entered, PackedWeight.pack(of_embedding, weights.fc_bias))
            program.linear(states, joined, PackedWeight.pack(of_feature), Epilogue.ADD, residual=entered)
            return joined, joined

        super().__init__(block, weights.head, None, enter)
