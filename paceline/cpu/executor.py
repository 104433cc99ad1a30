"""The native executor: the Llama family in bfloat16 on CPUs with the bfloat16 dot product, one call a step.

Turns an architecture and its weights into a program of the CPU kernels. It does not know requests or drafts. A row's
logits depend only on what the row sees: not on the rows beside it, not on how a prompt was cut into chunks, and not on
whether the row was reached along a chain or a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cpu.block import BlockBuilder, PackedBlock, takes_block
from paceline.cpu.operation import Epilogue
from paceline.cpu.packed_weight import PackedWeight, num_panels
from paceline.cpu.program import Program
from paceline.cpu.row_segment import RowSegment
from paceline.model.architecture import Architecture
from paceline.model.decoder_weights import DecoderWeights
from paceline.model.device import Device
from paceline.model.rope import RopeTable
from paceline.model.weights import SafetensorsDir
from paceline.target.attention.attend import Segment, StepPlan
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape, nothing


def runs_natively(arch: Architecture, device: Device, dtype: torch.dtype) -> bool:
    """Whether the kernels are here and take this model."""
    return takes_block(arch.block(0), device, dtype)


class NativeExecutor:
    """Runs one Llama-family model; see the module docstring."""

    joins_neighbours = False

    def __init__(self, config: Any, model_dir: Path) -> None:
        arch = Architecture.from_config(config)
        self.architecture = arch
        self.shape = ModelShape.of(arch)
        device = Device("cpu")
        self._ropes = {
            key: RopeTable(config, key, arch.head_dim, torch.bfloat16, device.torch_device)
            for key in sorted(set(arch.rope_keys), key=str)
        }
        for rope in self._ropes.values():
            rope.cover(arch.max_positions)
        with torch.inference_mode(), SafetensorsDir(model_dir) as weights:
            reader = DecoderWeights(arch, weights, torch.bfloat16)
            self._embedding = reader.embedding.contiguous()
            self._head = PackedWeight.pack(reader.head)
            self._final_norm = reader.final_norm.bfloat16()
            self._blocks = [PackedBlock.pack(reader.block(index)) for index in range(arch.num_layers)]
            self._embed_scale = float(torch.tensor(arch.embed_scale or 1.0).bfloat16())
        blocks_bytes = sum(block.num_bytes for block in self._blocks)
        self.num_bytes = self._embedding.nbytes + self._head.panels.nbytes + blocks_bytes
        self._plans: dict[tuple[frozenset[int], bool], _ModelProgram] = {}
        self._head_program = Program()
        self._head_in = self._head_program.buffer(arch.hidden_size, bound=True)
        self._head_out = self._head_program.buffer(arch.vocab_size, bound=True)
        self._head_program.linear(self._head_in, self._head_out, self._head, Epilogue.STORE_FLOAT)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of `tokens` `[n]`: `[n, hidden]`."""
        hidden = F.embedding(tokens, self._embedding)
        return hidden if self.architecture.embed_scale is None else hidden * self._embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed states: `[n, hidden] -> [n, vocab]` float32."""
        rows = hidden.reshape(-1, self.architecture.hidden_size).contiguous()
        logits = torch.empty(rows.shape[0], self.architecture.vocab_size)
        self._head_program.run([], [0] * rows.shape[0], {self._head_in: rows, self._head_out: logits})
        return self._capped(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.architecture.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(self, plan: StepPlan, on_begin: Callable[[], None] = nothing) -> ExecutorOutput:
        """Run the planned rows."""
        key = plan.capture, plan.added is not None
        if key not in self._plans:
            self._plans[key] = self._program(*key)
        model, n = self._plans[key], plan.num_rows
        rows = range(n) if plan.logit_rows is None else plan.logit_rows.tolist()
        hidden, vocab = self.architecture.hidden_size, self.architecture.vocab_size
        logits, maxima = torch.empty(len(rows), vocab), torch.empty(len(rows), num_panels(vocab))
        streams = {layer: torch.empty(n, hidden, dtype=torch.bfloat16) for layer in model.streams}
        bound = {model.logits: logits, model.maxima: maxima} | {
            model.streams[layer]: tensor for layer, tensor in streams.items()
        }
        if plan.added is not None:
            embedded = self.embed(plan.tokens)
            bound[model.inputs] = (embedded + plan.added.to(embedded)).contiguous()
        model.program.run(
            [_row_segment(segment) for segment in plan.segments],
            plan.positions.tolist(),
            bound,
            tokens=plan.tokens.tolist(),
            selected=rows,
            on_begin=on_begin,
        )
        is_capped = self.architecture.final_softcap is not None
        final = streams.pop(FINAL_NORM, None)
        return ExecutorOutput(self._capped(logits), streams, final, None if is_capped else maxima)

    def _program(self, capture: frozenset[int], takes_inputs: bool) -> _ModelProgram:
        arch, program = self.architecture, Program()
        hidden = program.buffer(arch.hidden_size)
        builder = BlockBuilder(program, arch.block(0))
        selected = program.buffer(arch.hidden_size)
        logits = program.buffer(arch.vocab_size, bound=True)
        maxima = program.buffer(num_panels(arch.vocab_size), bound=True)
        model = _ModelProgram(program, logits, maxima, {})

        def capture_stream(index: int) -> None:
            if index in capture:
                model.streams[index] = program.buffer(arch.hidden_size, bound=True)
                program.copy(hidden, model.streams[index])

        if takes_inputs:  # embedded by the caller, with something added
            model.inputs = program.buffer(arch.hidden_size, bound=True)
            program.copy(model.inputs, hidden)
        else:
            program.embed(self._embedding, hidden, self._embed_scale)
        for index, block in enumerate(self._blocks):
            capture_stream(index)
            builder.add(block, index, self._ropes[block.shape.rope_key].table, hidden)
        capture_stream(arch.num_layers)
        if FINAL_NORM in capture:
            model.streams[FINAL_NORM] = program.buffer(arch.hidden_size, bound=True)
            program.norm(hidden, model.streams[FINAL_NORM], self._final_norm, arch.norm_eps)
        program.gather(hidden, selected)
        program.linear(
            selected, logits, self._head, Epilogue.STORE_FLOAT, norm=self._final_norm, eps=arch.norm_eps,
            maxima=maxima, selected=True,
        )  # fmt: skip
        return model


class _ModelProgram:
    """A program and the buffers that its caller binds.

    Inputs (-1 where it embeds tokens itself), logits, their maxima, and the captured streams by layer.
    """

    __slots__ = ("inputs", "logits", "maxima", "program", "streams")

    def __init__(self, program: Program, logits: int, maxima: int, streams: dict[int, int]) -> None:
        self.program = program
        self.inputs = -1
        self.logits = logits
        self.maxima = maxima
        self.streams = streams


def _row_segment(segment: Segment) -> RowSegment:
    """A planned segment as the kernels take it."""
    paths: list[list[int]] | None = None
    if segment.parents is not None:
        paths = []
        for row, parent in enumerate(segment.parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return RowSegment(segment.slot.storage, segment.num_rows, segment.past, segment.past, paths)
