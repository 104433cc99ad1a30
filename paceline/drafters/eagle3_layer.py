"""The EAGLE-3 draft layer (Li et al., 2503.01840, section 3): its tensors and its forward pass.

Responsible for running rows of several sequences through one decoder layer whose attention reads the token's embedding
and a feature side by side. It runs through the target's own parts: packed linear products, key-value slots, rotary
tables. Knows nothing of chains, trees or commits; called by `paceline.drafters.eagle3`. Where the CPU kernels run it,
`eagle3_native.py` stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafters.checkpoint import CheckpointError, DrafterConfig
from paceline.target import Device
from paceline.target.device import RmsNorm
from paceline.target.kv_cache import Slot
from paceline.target.rope import RopeTable

MAX_BEST = 8
"""Most tokens of a row that :meth:`LayerOutput.best` can name."""


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


@dataclass(slots=True)
class Rows:
    """One sequence's rows in a forward pass.

    Attributes:
        slot: its cache; rows are written behind its settled and pending ones.
        tokens: target id of each row.
        states: `[n, hidden]`: fused features, or the layer's own outputs.
        positions: rotary position of each row.
        paths: of rows in a tree, the cache rows behind the settled ones that each sees, counted from there, its own
            last; None for a chain, whose rows see everything up to themselves.
    """

    slot: Slot
    tokens: Sequence[int]
    states: Tensor
    positions: Sequence[int]
    paths: list[list[int]] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this sequence."""
        return int(self.states.shape[0])

    @property
    def write_at(self) -> int:
        """Cache row of the first."""
        return self.slot.length + self.slot.num_pending


class LayerOutput(Protocol):
    """What a pass gives."""

    @property
    def states(self) -> Tensor:
        """The layer's output before the final norm, `[n, hidden]`, sequences in order."""

    @property
    def logits(self) -> Tensor:
        """Draft logits of the wanted rows, `[k, draft_vocab]` float32."""

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """The likeliest tokens of each wanted row, best first: log-probabilities, and draft ids.

        Args:
            count: how many, at most `MAX_BEST`.
        """


class DraftLayer(Protocol):
    """The draft layer, whatever it runs on."""

    hidden: int
    num_kv_heads: int
    head_dim: int
    where: torch.device
    dtype: torch.dtype

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences, writing their keys and values behind each slot's rows.

        Args:
            rows: one sequence's rows each.
            wanted: rows, counted over all sequences, whose logits are wanted.
        """


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Tensors and sizes of the layer, not yet packed."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    rope: RopeTable
    hidden: int
    target_hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab: int
    max_positions: int
    eps: float
    dtype: torch.dtype

    @classmethod
    def read(
        cls, config: DrafterConfig, tensors: Mapping[str, Tensor], embedding: Tensor, dtype: torch.dtype
    ) -> LayerWeights:
        """Take sizes from the checkpoint's config."""
        theta = float(config.shape.get("rope_theta", 10000.0))
        rope = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": theta})
        head_dim = config.size("head_dim")
        return cls(
            tensors=tensors,
            embedding=embedding,
            rope=RopeTable(rope, None, head_dim, dtype, embedding.device),
            hidden=config.size("hidden"),
            target_hidden=config.size("target_hidden"),
            intermediate=config.size("intermediate"),
            num_heads=config.size("num_heads"),
            num_kv_heads=config.size("num_kv_heads"),
            head_dim=head_dim,
            draft_vocab=config.size("draft_vocab"),
            max_positions=config.size("max_positions"),
            eps=float(config.shape.get("rms_eps", 1e-5)),
            dtype=dtype,
        )

    def get(self, *names: str) -> Tensor:
        """One weight, or several stacked."""
        parts = [self.tensors[f"{name}.weight"].to(self.dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def qkv(self) -> Tensor:
        """`[(num_heads + 2 * num_kv_heads) * head_dim, target_hidden + hidden]`."""
        return self.get(*(f"midlayer.self_attn.{x}_proj" for x in "qkv"))

    @property
    def gate_up(self) -> Tensor:
        """`[2 * intermediate, hidden]`."""
        return self.get("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj")

    @property
    def scale(self) -> float:
        """On attention scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class TorchOutput:
    """A pass of the torch form; see :class:`LayerOutput`."""

    states: Tensor
    logits: Tensor

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """See :class:`LayerOutput`."""
        log_probs, ids = self.logits.log_softmax(-1).topk(count, dim=-1)
        return log_probs.tolist(), ids.tolist()


class Eagle3Layer:
    """The layer in torch operators, with products packed for the device."""

    def __init__(self, weights: LayerWeights, device: Device) -> None:
        self.hidden, self.dtype = weights.hidden, weights.dtype
        self.num_heads, self.num_kv_heads = weights.num_heads, weights.num_kv_heads
        self.head_dim, self.group = weights.head_dim, weights.num_heads // weights.num_kv_heads
        self.where = device.torch_device
        self.rope, self.scale, self.embedding = weights.rope, weights.scale, weights.embedding
        self.qkv = device.pack(weights.qkv)
        self.out = device.pack(weights.get("midlayer.self_attn.o_proj"))
        self.gate_up = device.pack(weights.gate_up)
        self.down = device.pack(weights.get("midlayer.mlp.down_proj"))
        self.head = device.pack(weights.get("lm_head"))
        norms = (
            "midlayer.input_layernorm",
            "midlayer.hidden_norm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        self.embed_norm, self.state_norm, self.mlp_norm, self.final_norm = (
            RmsNorm(weights.get(name).to(self.where), weights.eps) for name in norms
        )

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; see :class:`DraftLayer`."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        state = join_rows([part.states for part in rows])  # [n, hidden]
        positions = [position for part in rows for position in part.positions]
        cos, sin = self.rope.gather(torch.tensor(positions, device=self.where), max(positions))
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
        state = self.down.add(F.silu(gate).mul_(up), state)
        asked = state if len(wanted) == state.shape[0] else state[list(wanted)]
        return TorchOutput(state, self.head(self.final_norm(asked)).float())

    def _attend(self, heads: Tensor, part: Rows) -> Tensor:
        """One sequence's attention over its slot: `[n, num_heads * head_dim]`."""
        n, slot, used = heads.shape[0], part.slot, part.write_at
        slot.append(0, used, heads.narrow(1, self.num_heads, 2 * self.num_kv_heads))
        mask = self._mask(part)
        slot.num_pending += n
        keys, values = slot.view(0, 0, used + n)
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
            if n == 1:
                return None
            return torch.full((n, used + n), -torch.inf, dtype=self.dtype, device=self.where).triu(used + 1)
        mask = torch.full((n, used + n), -torch.inf, dtype=self.dtype)
        mask[:, :settled] = 0.0
        for row, path in enumerate(part.paths):
            mask[row, [settled + seen for seen in path]] = 0.0
        return mask.to(self.where)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along rows; a single part is passed through."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
