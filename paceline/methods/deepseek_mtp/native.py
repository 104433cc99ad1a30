"""One multi-token prediction module on the CPU kernels; see `native_layer.py`.

Both norms before `eh_proj` are taken in the products that read them. Several modules in sequence run in torch
operators. Called by `paceline.methods.deepseek_mtp.drafter`.
"""

from __future__ import annotations

from paceline.cpu.draft_layer import NativeLayer, block_runs_natively
from paceline.cpu.packed_weight import PackedWeight
from paceline.cpu.program import Epilogue, Program
from paceline.methods.deepseek_mtp.layer import MtpWeights
from paceline.target import Device


def runs_natively(weights: MtpWeights, device: Device) -> bool:
    """Whether the kernels are here and take this checkpoint: one module of sizes that they know."""
    return len(weights.modules) == 1 and block_runs_natively(weights.modules[0].block, device, ())


class NativeMtpLayer(NativeLayer):
    """The module as a program; see :class:`paceline.methods.draft_layer.DraftLayer`."""

    def __init__(self, weights: MtpWeights) -> None:
        (module,) = weights.modules
        block, width = module.block, module.block.hidden

        def enter(program: Program, states: int) -> tuple[int, int]:
            embedded, entered, joined, read = (program.buffer(width) for _ in range(4))
            of_embedding, of_hidden = (part.contiguous() for part in module.join.split(width, dim=1))
            program.embed(weights.embedding.contiguous(), embedded)
            program.linear(
                embedded, entered, PackedWeight.pack(of_embedding), norm=module.embedding_norm, eps=block.eps
            )
            program.linear(
                states,
                joined,
                PackedWeight.pack(of_hidden),
                Epilogue.ADD,
                residual=entered,
                norm=module.hidden_norm,
                eps=block.eps,
            )
            program.norm(joined, read, module.input_norm, block.eps)
            return read, joined

        super().__init__(block, weights.head, module.head_norm, enter, goes_on_from_norm=weights.carries_norm)
