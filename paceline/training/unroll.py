"""A draft layer's decoder block over whole texts, run again on its own outputs: differentiable, and several steps deep.

Responsible for the block and for who sees whom in later steps (training-time test: Li et al., 2503.01840, section 3.2).
What attention reads differs from method to method and comes from the objective. Pure; called by the objectives of
drafters that go on from their own layer's output.

Row ``r`` of step 0 joins the target's features at position ``r`` with token ``r + 1`` and predicts token ``r + 2``.
Step ``j`` takes the layer's own output at row ``r`` instead of features, with token ``r + 1 + j``: what the drafter
sees ``j`` tokens after its last true feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.training.rotary import rope_tables, rotate

Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(tokens [rows, length], state [rows, length, hidden])`` to what attention reads and what its result is added to."""


class BlockSizes(Protocol):
    """Sizes of a decoder block."""

    @property
    def hidden(self) -> int:
        """Width of the stream."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""

    @property
    def rms_eps(self) -> float:
        """Added to mean squares."""


def unroll(
    sizes: BlockSizes,
    weights: Mapping[str, Tensor],
    prefix: str,
    tokens: Tensor,
    state: Tensor,
    enter: Enter,
    steps: int,
) -> Iterator[Tensor]:
    """Yields the block's output ``[rows, length, hidden]`` of each step.

    Args:
        sizes: the block's.
        weights: its tensors by name, in the type to compute in.
        prefix: of the names, such as ``midlayer.``.
        tokens: ``[rows, length]`` int64, right-padded; causal attention needs no mask for that.
        state: ``[rows, length, hidden]``, features.
        enter: see :data:`Enter`.
        steps: how many.
    """
    rows, length = tokens.shape
    dtype, kv_heads, head_dim = state.dtype, sizes.num_kv_heads, sizes.head_dim
    qkv_weight = torch.cat([weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    gate_up_weight = torch.cat([weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    groups = sizes.num_heads // kv_heads
    causal = torch.full((length, length), -torch.inf, dtype=dtype).triu(1).repeat(groups, 1)
    ids = tokens
    first_k = first_v = torch.empty(0)
    later: list[tuple[Tensor, Tensor]] = []
    for j in range(steps):
        ids = F.pad(ids[:, 1:], (0, 1))
        read, residual = enter(ids, state)
        heads = F.linear(read, qkv_weight).view(rows, length, -1, head_dim)
        q, k, v = heads.split((sizes.num_heads, kv_heads, kv_heads), dim=2)
        cos, sin = rope_tables(sizes.rope_theta, head_dim, j, length, dtype)
        q, k = rotate(q, cos, sin) * head_dim**-0.5, rotate(k, cos, sin)
        # [rows * kv_heads, groups * length, head_dim]; keys and values [rows * kv_heads, length, head_dim]
        q = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).reshape(-1, groups * length, head_dim)
        k = k.transpose(1, 2).reshape(-1, length, head_dim)
        v = v.transpose(1, 2).reshape(-1, length, head_dim)
        if j == 0:
            first_k, first_v = k, v
        else:
            later = [*later, (k.repeat(1, groups, 1), v.repeat(1, groups, 1))]
        out = _attend(q, first_k, first_v, causal, later)
        out = out.view(rows, kv_heads, groups, length, head_dim).permute(0, 3, 1, 2, 4)
        state = residual + F.linear(
            out.reshape(rows, length, -1), weights[f"{prefix}self_attn.o_proj.weight"]
        )
        m = F.rms_norm(
            state, (sizes.hidden,), weights[f"{prefix}post_attention_layernorm.weight"], sizes.rms_eps
        )
        gate, up = F.linear(m, gate_up_weight).chunk(2, dim=-1)
        state = state + F.linear(F.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])
        yield state


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention to true rows up to one's own (causal) and to one's own row of every later step (diagonal)."""
    scores = torch.bmm(q, k.transpose(1, 2)) + causal
    if not later:
        return torch.bmm(scores.softmax(-1), v)
    own = torch.stack([(q * key).sum(-1) for key, _ in later], dim=-1)  # [heads, groups * length, steps]
    # Two softmaxes joined by hand: cheaper than copying the large score matrix to append a few columns.
    peak = torch.maximum(scores.detach().amax(-1, keepdim=True), own.detach().amax(-1, keepdim=True))
    weights = (scores - peak).exp()
    own_weights = (own - peak).exp()
    total = weights.sum(-1, keepdim=True) + own_weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, v)
    for i, (_, value) in enumerate(later):
        out = out + own_weights[..., i : i + 1] * value
    return out / total
