"""The EAGLE-3 draft layer on the CPU kernels; see `native_layer.py`. Called by `paceline.methods.eagle3.drafter`."""

from __future__ import annotations

from paceline.cpu.draft_layer import NativeLayer, block_runs_natively
from paceline.cpu.program import Program
from paceline.methods.eagle3.layer import Eagle3Weights
from paceline.target import Device


def runs_natively(weights: Eagle3Weights, device: Device) -> bool:
    """Whether the kernels are here and take this layer."""
    return block_runs_natively(weights.block, device, [weights.embedding.shape[1]])


class NativeEagle3Layer(NativeLayer):
    """The layer as a program; see :class:`paceline.methods.draft_layer.DraftLayer`."""

    def __init__(self, weights: Eagle3Weights) -> None:
        block, width = weights.block, weights.embedding.shape[1]

        def enter(program: Program, states: int) -> tuple[int, int]:
            embedded = program.buffer(width)
            joined = program.buffer(width + block.hidden)
            program.embed(weights.embedding.contiguous(), embedded)
            program.norm(embedded, joined, weights.embed_norm, block.eps)
            program.norm(states, joined, weights.state_norm, block.eps, offset=width)
            if not weights.adds_to_norm:
                return joined, states
            normed = program.buffer(block.hidden)
            program.norm(states, normed, weights.state_norm, block.eps)
            return joined, normed

        super().__init__(
            block, weights.head, weights.final_norm, enter, weights.upper, weights.goes_on_from_norm
        )
