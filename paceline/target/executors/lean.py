"""The lean executor: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 2 and 3 in few torch operators.

Runs the weights of a safetensors directory as transformers would, with fused projections packed for the device. It does
not know requests, drafts or how rows became visible to each other. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.architecture import Architecture
from paceline.model.decoder_weights import DecoderWeights
from paceline.model.device import Device
from paceline.model.norm import RmsNorm
from paceline.model.rope import RopeTable
from paceline.model.torch_block import TorchBlock
from paceline.model.weights import SafetensorsDir
from paceline.target.attention.attend import StepPlan
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape, nothing


class LeanExecutor:
    """Runs one Llama-family model; see the module docstring."""

    joins_neighbours = True

    def __init__(
        self, config: Any, model_dir: Path, device: Device, dtype: torch.dtype, *, packed: bool = True
    ) -> None:
        self.architecture = arch = Architecture.from_config(config)
        self.shape = ModelShape.of(arch)
        self._compute_dtype = compute_dtype = device.compute_dtype(dtype)
        where = device.torch_device
        self._ropes = {
            key: RopeTable(config, key, arch.head_dim, compute_dtype, where)
            for key in sorted(set(arch.rope_keys), key=str)
        }
        with torch.inference_mode(), SafetensorsDir(model_dir) as weights:
            reader = DecoderWeights(arch, weights, dtype)
            self._embedding = reader.embedding.to(where)  # [vocab, hidden]
            self._head = device.pack(reader.head, packed=packed)
            self._final_norm = RmsNorm(reader.final_norm.to(compute_dtype).to(where), arch.norm_eps)
            self._blocks = [
                TorchBlock(reader.block(index), device, compute_dtype, index, packed=packed)
                for index in range(arch.num_layers)
            ]
        blocks_bytes = sum(block.num_bytes for block in self._blocks)
        self.num_bytes = self._embedding.nbytes + self._head.num_bytes + blocks_bytes
        self._embed_scale = (
            None if arch.embed_scale is None else torch.tensor(arch.embed_scale).to(compute_dtype).to(where)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of `tokens` `[n]`: `[n, hidden]`."""
        hidden = F.embedding(tokens, self._embedding).to(self._compute_dtype)
        return hidden if self._embed_scale is None else hidden * self._embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed states: `[n, hidden] -> [n, vocab]` float32."""
        logits = self._head(hidden).float()
        cap = self.architecture.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(self, plan: StepPlan, on_begin: Callable[[], None] = nothing) -> ExecutorOutput:
        """Run the planned rows."""
        on_begin()
        arch = self.architecture
        ropes = {key: rope.gather(plan.positions, plan.max_position) for key, rope in self._ropes.items()}
        hidden = self.embed(plan.tokens)  # [n, hidden]
        if plan.added is not None:
            hidden = hidden + plan.added.to(hidden)
        streams: dict[int, Tensor] = {}
        for index, block in enumerate(self._blocks):
            if index in plan.capture:
                streams[index] = hidden
            hidden = block.forward(hidden, ropes[block.shape.rope_key], plan.attend)
        if arch.num_layers in plan.capture:
            streams[arch.num_layers] = hidden
        rows = plan.logit_rows
        if FINAL_NORM in plan.capture:
            final = self._final_norm(hidden)
            selected = final if rows is None else final.index_select(0, rows)
        else:
            final = None
            selected = self._final_norm(hidden if rows is None else hidden.index_select(0, rows))
        logits = (
            self.head(selected)
            if selected.shape[0]
            else selected.new_empty((0, arch.vocab_size), dtype=torch.float32)
        )
        return ExecutorOutput(logits, streams, final)
