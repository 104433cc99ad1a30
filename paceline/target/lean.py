"""The lean executor: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 2 and 3 in few operator calls.

Responsible for running the weights of a safetensors directory as transformers would, with fused projections
packed for the device. It does not know requests, drafts or how rows became visible to each other. Called by
the engine. On CPU one decode step costs little more than reading the weights, so each avoidable operator call
shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.architecture import Architecture
from paceline.model.block import BlockWeights, Projection
from paceline.model.decoder_weights import DecoderWeights
from paceline.model.device import Device, Linear, RmsNorm
from paceline.model.rope import RopeTable
from paceline.model.weights import SafetensorsDir
from paceline.target.attention import Scoring, StepPlan, attend
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape, nothing


@dataclass(slots=True)
class _Layer:
    """One decoder layer's packed weights."""

    attention_norm: RmsNorm
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    out: Linear  # [hidden, num_heads * head_dim]
    post_attention_norm: RmsNorm | None
    mlp_norm: RmsNorm
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]
    post_mlp_norm: RmsNorm | None
    scoring: Scoring
    rope_key: str | None


class LeanExecutor:
    """Runs one Llama-family model; see the module docstring."""

    joins_neighbours = True

    def __init__(
        self, config: Any, model_dir: Path, device: Device, dtype: torch.dtype, *, packed: bool = True
    ) -> None:
        arch = Architecture.from_config(config)
        self.architecture = arch
        self.shape = ModelShape.of(arch)
        self._compute_dtype = device.compute_dtype(dtype)
        self._activation: Callable[[Tensor], Tensor] = (
            F.silu if arch.activation == "silu" else lambda x: F.gelu(x, approximate="tanh")
        )
        where = device.torch_device
        self._ropes = {
            key: RopeTable(config, key, arch.head_dim, self._compute_dtype, where)
            for key in sorted(set(arch.rope_keys), key=str)
        }
        with torch.inference_mode(), SafetensorsDir(model_dir) as weights:
            reader = DecoderWeights(arch, weights, dtype)
            packer = _Packer(arch, device, self._compute_dtype, packed)
            self._embedding = reader.embedding.to(where)  # [vocab, hidden]
            self._head = device.pack(reader.head, packed=packed)
            self._final_norm = packer.norm(reader.final_norm)
            self._layers = [packer.layer(index, reader.block(index)) for index in range(arch.num_layers)]
        packed_weights = [self._head, *(w for x in self._layers for w in (x.qkv, x.out, x.gate_up, x.down))]
        self.num_bytes = self._embedding.nbytes + sum(weight.num_bytes for weight in packed_weights)
        self._embed_scale = (
            None
            if arch.embed_scale is None
            else torch.tensor(arch.embed_scale).to(self._compute_dtype).to(where)
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
        tables = {key: rope.gather(plan.positions, plan.max_position) for key, rope in self._ropes.items()}
        hidden = self.embed(plan.tokens)  # [n, hidden]
        if plan.added is not None:
            hidden = hidden + plan.added.to(hidden)
        streams: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in plan.capture:
                streams[index] = hidden
            hidden = self._attention(hidden, index, layer, tables[layer.rope_key], plan)
            hidden = self._mlp(hidden, layer)
        if arch.num_layers in plan.capture:
            streams[arch.num_layers] = hidden
        rows = plan.logit_rows
        if FINAL_NORM in plan.capture:
            final = self._final_norm(hidden)
            asked = final if rows is None else final.index_select(0, rows)
        else:
            final = None
            asked = self._final_norm(hidden if rows is None else hidden.index_select(0, rows))
        logits = (
            self.head(asked) if asked.shape[0] else asked.new_empty((0, arch.vocab_size), dtype=torch.float32)
        )
        return ExecutorOutput(logits, streams, final)

    def _attention(
        self, hidden: Tensor, index: int, layer: _Layer, table: tuple[Tensor, Tensor], plan: StepPlan
    ) -> Tensor:
        arch = self.architecture
        cos, sin = table
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        qkv = layer.qkv(layer.attention_norm(hidden)).view(-1, heads + 2 * kv_heads, head_dim)
        rotary = qkv.narrow(1, 0, heads + kv_heads)  # queries and keys, rotated in place
        if layer.qk_norm is not None:
            torch.mul(F.rms_norm(rotary, (head_dim,), None, arch.norm_eps), layer.qk_norm, out=rotary)
        swapped = rotary.roll(head_dim // 2, -1)
        rotary.mul_(cos).addcmul_(swapped, sin)
        queries = qkv.narrow(1, 0, heads).view(-1, arch.num_heads // arch.num_kv_heads, kv_heads, head_dim)
        keys_values = qkv.narrow(1, heads, 2 * kv_heads)
        mixed = attend(queries, keys_values, index, plan, layer.scoring)
        if layer.post_attention_norm is None:
            return layer.out.add(mixed, hidden)
        return hidden + layer.post_attention_norm(layer.out(mixed))

    def _mlp(self, hidden: Tensor, layer: _Layer) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
        gated = self._activation(gate).mul_(up)
        if layer.post_mlp_norm is None:
            return layer.down.add(gated, hidden)
        return hidden + layer.post_mlp_norm(layer.down(gated))


class _Packer:
    """Packs a layer's weights for the device."""

    def __init__(self, arch: Architecture, device: Device, compute_dtype: torch.dtype, packed: bool) -> None:
        self._arch = arch
        self._device = device
        self._compute_dtype = compute_dtype
        self._packed = packed

    def norm(self, weight: Tensor) -> RmsNorm:
        """A norm over the hidden width."""
        return RmsNorm(self._small(weight), self._arch.norm_eps)

    def _small(self, weight: Tensor) -> Tensor:
        return weight.to(self._compute_dtype).to(self._device.torch_device)

    def _linear(self, projection: Projection) -> Linear:
        return self._device.pack(projection.weight, projection.bias, packed=self._packed)

    def layer(self, index: int, weights: BlockWeights) -> _Layer:
        """Layer `index`, packed."""
        arch = self._arch
        assert weights.attention_norm is not None
        after_attention, after_mlp = weights.post_attention_norm, weights.post_mlp_norm
        return _Layer(
            attention_norm=self.norm(weights.attention_norm),
            qkv=self._linear(weights.qkv),
            qk_norm=None if weights.qk_norm is None else self._small(weights.qk_norm).contiguous(),
            out=self._linear(weights.out),
            post_attention_norm=None if after_attention is None else self.norm(after_attention),
            mlp_norm=self.norm(weights.mlp_norm),
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
            post_mlp_norm=None if after_mlp is None else self.norm(after_mlp),
            scoring=Scoring(arch.attention_scale, arch.windows[index], arch.attention_softcap),
            rope_key=arch.rope_keys[index],
        )
