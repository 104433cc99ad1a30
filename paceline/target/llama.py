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

from paceline.target.architecture import Architecture
from paceline.target.attention import Scoring, StepPlan, attend
from paceline.target.device import Device, Linear, RmsNorm
from paceline.target.executor import FINAL_NORM, ExecutorOutput, ModelShape
from paceline.target.rope import RopeTable
from paceline.target.weights import SafetensorsDir


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

    def __init__(
        self, config: Any, model_dir: Path, device: Device, dtype: torch.dtype, *, packed: bool = True
    ) -> None:
        arch = Architecture.from_config(config)
        self.architecture = arch
        self.shape = ModelShape(
            arch.model_type,
            arch.num_layers,
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            arch.vocab_size,
            arch.max_positions,
        )
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
            loader = _Loader(arch, weights, device, dtype, packed)
            self._embedding = weights.get("model.embed_tokens.weight", dtype).to(where)  # [vocab, hidden]
            head_name = "model.embed_tokens.weight" if arch.has_tied_head else "lm_head.weight"
            self._head = device.pack(weights.get(head_name, dtype), packed=packed)
            self._final_norm = loader.norm("model.norm.weight")
            self._layers = [loader.layer(index) for index in range(arch.num_layers)]
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

    def forward(self, plan: StepPlan) -> ExecutorOutput:
        """Run the planned rows."""
        arch = self.architecture
        tables = {key: rope.gather(plan.positions, plan.max_position) for key, rope in self._ropes.items()}
        hidden = self.embed(plan.tokens)  # [n, hidden]
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
        queries = qkv.narrow(1, 0, heads).view(-1, arch.group, kv_heads, head_dim)
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


class _Loader:
    """Reads, fuses and packs one layer at a time."""

    def __init__(
        self, arch: Architecture, weights: SafetensorsDir, device: Device, dtype: torch.dtype, packed: bool
    ) -> None:
        self._arch = arch
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._packed = packed

    def norm(self, name: str) -> RmsNorm:
        """A norm over the hidden width."""
        return RmsNorm(self.norm_weight(name), self._arch.norm_eps)

    def norm_weight(self, name: str) -> Tensor:
        """A norm weight, with the family's offset applied in float32."""
        weight = self._weights.get(name, torch.float32) + self._arch.norm_offset
        return weight.to(self._device.compute_dtype(self._dtype)).to(self._device.torch_device)

    def _group_major(self, rows: Tensor) -> Tensor:
        """Reorder query heads from key-head-major to group-major, the order `attend` takes."""
        arch = self._arch
        by_head = rows.view(arch.num_kv_heads, arch.group, arch.head_dim, *rows.shape[1:])
        return by_head.transpose(0, 1).reshape(rows.shape)

    def _fused(self, names: list[str], *, reorder_first: bool = False) -> Linear:
        weights = [self._weights.get(f"{name}.weight", self._dtype) for name in names]
        biases = [
            self._weights.get(f"{name}.bias", self._dtype)
            for name in names
            if f"{name}.bias" in self._weights
        ]
        if reorder_first:
            weights[0] = self._group_major(weights[0])
            if biases:
                biases[0] = self._group_major(biases[0])
        bias = torch.cat(biases) if biases else None
        return self._device.pack(torch.cat(weights), bias, packed=self._packed)

    def layer(self, index: int) -> _Layer:
        """Layer `index`, packed."""
        arch, prefix = self._arch, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qk_norm = None
        if arch.has_qk_norm:
            query = self.norm_weight(f"{attention}.q_norm.weight")
            key = self.norm_weight(f"{attention}.k_norm.weight")
            qk_norm = torch.cat(
                [query.expand(arch.num_heads, -1), key.expand(arch.num_kv_heads, -1)]
            ).contiguous()
        out = self._weights.get(f"{attention}.o_proj.weight", self._dtype)
        out_bias_name = f"{attention}.o_proj.bias"
        out_bias = self._weights.get(out_bias_name, self._dtype) if out_bias_name in self._weights else None
        sandwich = arch.has_sandwich_norms
        return _Layer(
            attention_norm=self.norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._fused([f"{attention}.{name}_proj" for name in "qkv"], reorder_first=True),
            qk_norm=qk_norm,
            out=self._device.pack(self._group_major(out.t().contiguous()).t(), out_bias, packed=self._packed),
            post_attention_norm=self.norm(f"{prefix}.post_attention_layernorm.weight") if sandwich else None,
            mlp_norm=self.norm(
                f"{prefix}.pre_feedforward_layernorm.weight"
                if sandwich
                else f"{prefix}.post_attention_layernorm.weight"
            ),
            gate_up=self._fused([f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=self._fused([f"{mlp}.down_proj"]),
            post_mlp_norm=self.norm(f"{prefix}.post_feedforward_layernorm.weight") if sandwich else None,
            scoring=Scoring(arch.attention_scale, arch.windows[index], arch.attention_softcap),
            rope_key=arch.rope_keys[index],
        )
