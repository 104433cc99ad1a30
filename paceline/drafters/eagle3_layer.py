"""The EAGLE-3 draft layer (Li et al., 2503.01840, section 3): its tensors and its forward pass.

Responsible for running rows of several sequences through one decoder layer whose attention reads the token's embedding
and a feature side by side. It runs through the target's own parts: packed linear products, key-value slots, rotary
tables. Knows nothing of chains, trees or commits; called by `paceline.drafters.eagle3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError, DrafterConfig
from paceline.target import Device
from paceline.target.device import RmsNorm
from paceline.target.kv_cache import Slot
from paceline.target.rope import RopeTable


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/eagle3.md)."""
    d, target = config.size("hidden"), config.size("target_hidden")
    head_dim, intermediate = config.size("head_dim"), config.size("intermediate")
    q, kv = config.size("num_heads") * head_dim, config.size("num_kv_heads") * head_dim
    vocab, draft_vocab = config.size("target_vocab"), config.size("draft_vocab")
    return {
        "fc.weight": (d, len(tap_layers(config)) * target),
        "midlayer.input_layernorm.weight": (target,),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.post_attention_layernorm.weight": (d,),
        "midlayer.self_attn.q_proj.weight": (q, target + d),
        "midlayer.self_attn.k_proj.weight": (kv, target + d),
        "midlayer.self_attn.v_proj.weight": (kv, target + d),
        "midlayer.self_attn.o_proj.weight": (d, q),
        "midlayer.mlp.gate_proj.weight": (intermediate, d),
        "midlayer.mlp.up_proj.weight": (intermediate, d),
        "midlayer.mlp.down_proj.weight": (d, intermediate),
        "norm.weight": (d,),
        "lm_head.weight": (draft_vocab, d),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }


def tap_layers(config: DrafterConfig) -> tuple[int, ...]:
    layers = config.shape.get("tap_layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) and i >= 0 for i in layers):
        raise CheckpointError("shape.tap_layers must list the target layers whose incoming streams are read")
    return tuple(layers)


class Eagle3Layer:
    """The draft layer's weights and its forward pass over rows of several sequences."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self.hidden = config.size("hidden")
        self.target_hidden = config.size("target_hidden")
        self.num_heads, self.num_kv_heads = config.size("num_heads"), config.size("num_kv_heads")
        self.head_dim = config.size("head_dim")
        self.group = self.num_heads // self.num_kv_heads
        self.where, self.dtype = device.torch_device, dtype
        eps = float(config.shape.get("rms_eps", 1e-5))
        rope = SimpleNamespace(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": float(config.shape.get("rope_theta", 10000.0)),
            }
        )
        self.rope = RopeTable(rope, None, self.head_dim, dtype, self.where)
        self.scale = self.head_dim**-0.5
        self.embedding = embedding  # [target_vocab, target_hidden]

        def weight(name: str) -> Tensor:
            return tensors[name].to(dtype)

        attention = [weight(f"midlayer.self_attn.{x}_proj.weight") for x in "qkv"]
        gate_up = [weight(f"midlayer.mlp.{x}_proj.weight") for x in ("gate", "up")]
        self.qkv = device.pack(torch.cat(attention))
        self.out = device.pack(weight("midlayer.self_attn.o_proj.weight"))
        self.gate_up = device.pack(torch.cat(gate_up))
        self.down = device.pack(weight("midlayer.mlp.down_proj.weight"))
        self.head = device.pack(weight("lm_head.weight"))
        norms = (
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        self.embed_norm, self.state_norm, self.mlp_norm, self.final_norm = (
            RmsNorm(weight(f"{name}.weight").to(self.where), eps) for name in norms
        )

    def forward(self, rows: Sequence[Rows], max_position: int) -> Tensor:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            rows: one sequence's rows each.
            max_position: no position is above it.

        Returns:
            The layer's output before the final norm, `[n, hidden]`, sequences in order.
        """
        tokens = join_rows([part.tokens for part in rows])
        state = join_rows([part.states for part in rows])  # [n, hidden]
        cos, sin = self.rope.gather(join_rows([part.positions for part in rows]), max_position)
        embedded = self.embed_norm(F.embedding(tokens, self.embedding))
        joined = torch.cat((embedded, self.state_norm(state)), dim=-1)  # [n, target_hidden + hidden]
        heads = self.qkv(joined).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        rotary = heads.narrow(1, 0, self.num_heads + self.num_kv_heads)
        swapped = rotary.roll(self.head_dim // 2, -1)
        rotary.mul_(cos).addcmul_(swapped, sin)
        mixed, first = [], 0
        for part in rows:
            end = first + part.num_rows
            mixed.append(self._attend(heads[first:end], part))
            first = end
        state = self.out.add(join_rows(mixed), state)
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        return self.down.add(F.silu(gate).mul_(up), state)

    def _attend(self, heads: Tensor, part: Rows) -> Tensor:
        """One sequence's attention over its slot: `[n, num_heads * head_dim]`."""
        n, slot = heads.shape[0], part.slot
        used = slot.length + slot.num_pending
        slot.append(0, used, heads.narrow(1, self.num_heads, 2 * self.num_kv_heads))
        slot.num_pending += n
        keys, values = slot.view(0, 0, used + n)
        # Query heads that share a key head become rows of it, so that keys are read once.
        queries = heads.narrow(1, 0, self.num_heads).reshape(n, self.num_kv_heads, self.group, self.head_dim)
        queries = queries.transpose(0, 1).reshape(1, self.num_kv_heads, n * self.group, self.head_dim)
        mask = part.mask
        if mask is None and n > 1:
            mask = torch.full((n, used + n), -torch.inf, dtype=self.dtype, device=self.where).triu(used + 1)
        if mask is not None:
            mask = mask.repeat_interleave(self.group, dim=0)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return out.view(self.num_kv_heads, n, -1).transpose(0, 1).reshape(n, -1)

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits of layer outputs: `[n, hidden] -> [n, draft_vocab]` float32."""
        return self.head(self.final_norm(states)).float()


@dataclass(slots=True)
class Rows:
    """One sequence's rows in a forward pass.

    Attributes:
        tokens: `[n]` int64 target ids.
        states: `[n, hidden]`: fused features, or the layer's own outputs.
        positions: `[n]` int64 rotary positions.
        mask: `[n, rows in the slot + n]` additive; None for a causal chain.
    """

    slot: Slot
    tokens: Tensor
    states: Tensor
    positions: Tensor
    mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this sequence."""
        return int(self.states.shape[0])


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along rows; a single part is passed through."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
