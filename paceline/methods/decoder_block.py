"""One decoder block of the Llama family over the cache slots of several sequences: attention, then the gated product.

Responsible for the block's tensors and sizes and for its form in torch operators, through the target's own parts:
packed products, key-value slots, rotary tables. What attention reads and what its result is added to differs from
method to method and comes from the caller. Knows nothing of embeddings, heads, chains or trees; called by the methods'
layers. Its form on the CPU kernels is `native_layer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.draft_layer import Rows, join_rows
from paceline.model.device import RmsNorm
from paceline.model.rope import RopeTable
from paceline.target import Device

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not depend on the length of the text."""


def block_shapes(config: DrafterConfig, prefix: str, read_width: int) -> dict[str, tuple[int, ...]]:
    """A block's tensors by name.

    Args:
        config: the checkpoint's; `shape` holds the sizes, `qkv_bias` where the products have one, and `head_norms`
            where queries and keys are normed head by head.
        prefix: of the names, such as `midlayer.`.
        read_width: width of what attention reads.
    """
    d, head_dim, intermediate = config.size("hidden"), config.size("head_dim"), config.size("intermediate")
    q, kv = config.size("num_heads") * head_dim, config.size("num_kv_heads") * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, read_width),
        "self_attn.k_proj.weight": (kv, read_width),
        "self_attn.v_proj.weight": (kv, read_width),
        "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (intermediate, d),
        "mlp.up_proj.weight": (intermediate, d),
        "mlp.down_proj.weight": (d, intermediate),
    }
    if config.flag("qkv_bias"):
        shapes |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
    if config.flag("head_norms"):
        shapes |= {f"self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    return {prefix + name: shape for name, shape in shapes.items()}


def rope_parameters(config: DrafterConfig) -> dict[str, Any]:
    """A checkpoint's rotary parameters, as transformers names them: `shape.rope_parameters`, or `rope_theta` alone.

    Raises:
        CheckpointError: of a variant that is not supported.
    """
    parameters = config.shape.get("rope_parameters")
    if parameters is None:
        parameters = {"rope_type": "default", "rope_theta": config.shape.get("rope_theta", 10000.0)}
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") not in ROPE_TYPES:
        raise CheckpointError(f"shape.rope_parameters.rope_type must be one of {', '.join(ROPE_TYPES)}")
    return {**parameters, "rope_theta": float(parameters.get("rope_theta", 10000.0))}


def rope_table(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """The rotary table of a checkpoint."""
    heads, head_dim = config.size("num_heads"), config.size("head_dim")
    parameters = rope_parameters(config)
    if (
        parameters["rope_type"] == "default"
    ):  # needs no more of a configuration, and transformers' take seconds to import
        return RopeTable(SimpleNamespace(rope_parameters=parameters), None, head_dim, dtype, device)
    from transformers import LlamaConfig

    like = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=config.size("max_positions"),
        rope_parameters=parameters,
    )
    return RopeTable(like, None, head_dim, dtype, device)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Tensors and sizes of a block, not yet packed.

    Attributes:
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, read_width]`.
        qkv_bias: one for each row of `qkv`, or None.
        head_norms: `[num_heads + num_kv_heads, head_dim]`, of the norms of queries and keys, or None.
        out: `[hidden, num_heads * head_dim]`.
        mlp_norm: `[hidden]`, of the norm before the gated product.
        gate_up: `[2 * intermediate, hidden]`, gates first.
        down: `[hidden, intermediate]`.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    rope: RopeTable
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    dtype: torch.dtype

    @classmethod
    def read(
        cls,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        prefix: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BlockWeights:
        """Take sizes from the checkpoint's config, and tensors by the names of :func:`block_shapes`.

        Raises:
            CheckpointError: heads that do not fall into groups, or a rotary variant that is not supported.
        """
        num_heads, num_kv_heads = config.size("num_heads"), config.size("num_kv_heads")
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"shape.num_heads {num_heads} is no multiple of shape.num_kv_heads {num_kv_heads}"
            )

        def get(*names: str) -> Tensor:
            parts = [tensors[prefix + name].to(dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        head_norms = None
        if config.flag("head_norms"):
            query, key = (get(f"self_attn.{x}_norm.weight") for x in "qk")
            head_norms = torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)])
        has_bias = config.flag("qkv_bias")
        return cls(
            qkv=get(*(f"self_attn.{x}_proj.weight" for x in "qkv")),
            qkv_bias=get(*(f"self_attn.{x}_proj.bias" for x in "qkv")) if has_bias else None,
            head_norms=head_norms,
            out=get("self_attn.o_proj.weight"),
            mlp_norm=get("post_attention_layernorm.weight"),
            gate_up=get("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=get("mlp.down_proj.weight"),
            rope=rope_table(config, dtype, device),
            hidden=config.size("hidden"),
            intermediate=config.size("intermediate"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.size("head_dim"),
            max_positions=config.size("max_positions"),
            eps=float(config.shape.get("rms_eps", 1e-5)),
            dtype=dtype,
        )

    @property
    def scale(self) -> float:
        """On attention scores."""
        return float(self.head_dim**-0.5)


class DecoderBlock:
    """The block in torch operators, with products packed for the device.

    Args:
        weights: of the block.
        device: where it runs.
        layer: layer of the cache slots.
        is_last: whether no block follows that runs the same rows: the last one settles them as pending.
        first_row: rows of a slot before this one hold nothing in this layer, and none but they themselves see them.
    """

    def __init__(
        self, weights: BlockWeights, device: Device, layer: int = 0, is_last: bool = True, first_row: int = 0
    ) -> None:
        self._layer, self._is_last, self._first_row = layer, is_last, first_row
        self._eps = weights.eps
        self.head_norms = None if weights.head_norms is None else weights.head_norms.to(device.torch_device)
        self.hidden, self.dtype = weights.hidden, weights.dtype
        self.num_heads, self.num_kv_heads = weights.num_heads, weights.num_kv_heads
        self.head_dim, self.group = weights.head_dim, weights.num_heads // weights.num_kv_heads
        self.where = device.torch_device
        self.rope, self.scale = weights.rope, weights.scale
        bias = None if weights.qkv_bias is None else weights.qkv_bias.to(self.where)
        self.qkv = device.pack(weights.qkv, bias)
        self.out = device.pack(weights.out)
        self.gate_up = device.pack(weights.gate_up)
        self.down = device.pack(weights.down)
        self.mlp_norm = RmsNorm(weights.mlp_norm.to(self.where), weights.eps)

    def forward(self, read: Tensor, residual: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            read: what attention reads, `[n, read_width]`.
            residual: what its result is added to, `[n, hidden]`.
            rows: one sequence's rows each, `n` in all.

        Returns:
            `[n, hidden]`.
        """
        positions = [position for part in rows for position in part.positions]
        cos, sin = self.rope.gather(torch.tensor(positions, device=self.where), max(positions))
        heads = self.qkv(read).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        rotary = heads.narrow(1, 0, self.num_heads + self.num_kv_heads)
        if self.head_norms is not None:
            rotary.copy_(F.rms_norm(rotary, (self.head_dim,), None, self._eps).mul_(self.head_norms))
        swapped = rotary.roll(self.head_dim // 2, -1)
        rotary.mul_(cos).addcmul_(swapped, sin)
        mixed, first = [], 0
        for part in rows:
            end = first + part.num_rows
            mixed.append(self._attend(heads[first:end], part))
            first = end
        state = self.out.add(join_rows(mixed), residual)
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        return self.down.add(F.silu(gate).mul_(up), state)

    def _attend(self, heads: Tensor, part: Rows) -> Tensor:
        """One sequence's attention over its slot: `[n, num_heads * head_dim]`."""
        n, slot, used = heads.shape[0], part.slot, part.write_at
        slot.append(self._layer, used, heads.narrow(1, self.num_heads, 2 * self.num_kv_heads))
        mask = self._mask(part)
        if self._is_last:
            slot.num_pending += n
        keys, values = slot.view(self._layer, 0, used + n)
        # Query heads that share a key head become rows of it, so that keys are read once.
        queries = heads.narrow(1, 0, self.num_heads).reshape(n, self.num_kv_heads, self.group, self.head_dim)
        queries = queries.transpose(0, 1).reshape(1, self.num_kv_heads, n * self.group, self.head_dim)
        if mask is not None:
            mask = mask.repeat_interleave(self.group, dim=0)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return out.view(self.num_kv_heads, n, -1).transpose(0, 1).reshape(n, -1)

    def _mask(self, part: Rows) -> Tensor | None:
        """Additive `[n, rows in the slot + n]`, or None where all is visible."""
        n, used, settled = part.num_rows, part.write_at, part.slot.length
        if part.paths is None:
            if n == 1 and not self._first_row:
                return None
            mask = torch.full((n, used + n), -torch.inf, dtype=self.dtype, device=self.where).triu(used + 1)
            mask[:, : self._first_row] = -torch.inf
            mask.diagonal(used).zero_()
            return mask
        mask = torch.full((n, used + n), -torch.inf, dtype=self.dtype)
        mask[:, self._first_row : settled] = 0.0
        for row, path in enumerate(part.paths):
            own = settled + path[-1]
            mask[row, [at for seen in path if (at := settled + seen) >= self._first_row or at == own]] = 0.0
        return mask.to(self.where)
