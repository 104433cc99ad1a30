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

from paceline.training.attention import OwnKeys, Pattern, attend
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


class UnrolledBlock:
    """A decoder block over whole texts that is run again, and then sees its own rows of earlier runs too.

    Args:
        sizes: the block's.
        weights: its tensors by name, in the type to compute in.
        prefix: of the names, such as ``midlayer.``.
        length: of the texts.
        dtype: to compute in.
    """

    def __init__(
        self, sizes: BlockSizes, weights: Mapping[str, Tensor], prefix: str, length: int, dtype: torch.dtype
    ) -> None:
        self._sizes, self._length, self._dtype = sizes, length, dtype
        self._qkv = torch.cat([weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
        self._gate_up = torch.cat([weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        self._out = weights[f"{prefix}self_attn.o_proj.weight"]
        self._norm = weights[f"{prefix}post_attention_layernorm.weight"]
        self._down = weights[f"{prefix}mlp.down_proj.weight"]
        self._groups = sizes.num_heads // sizes.num_kv_heads
        self._causal = Pattern.causal(length, dtype).bias
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[OwnKeys] = []

    def step(self, read: Tensor, residual: Tensor, offset: int) -> Tensor:
        """The block's output ``[rows, length, hidden]``.

        The first step's rows see those before them; a later one's see what their own row of the first step saw, and
        their own row of every step since.

        Args:
            read: what attention reads, ``[rows, length, read_width]``.
            residual: what its result is added to, ``[rows, length, hidden]``.
            offset: positions that the rows stand behind those of the first step.
        """
        sizes, groups, length = self._sizes, self._groups, self._length
        rows, kv_heads, head_dim = read.shape[0], sizes.num_kv_heads, sizes.head_dim
        heads = F.linear(read, self._qkv).view(rows, length, -1, head_dim)
        q, k, v = heads.split((sizes.num_heads, kv_heads, kv_heads), dim=2)
        cos, sin = rope_tables(sizes.rope_theta, head_dim, offset, length, self._dtype)
        q, k = rotate(q, cos, sin) * head_dim**-0.5, rotate(k, cos, sin)
        # [rows * kv_heads, groups, length, head_dim]; keys and values [rows * kv_heads, length, head_dim]
        q = q.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        k = k.transpose(1, 2).reshape(-1, length, head_dim)
        v = v.transpose(1, 2).reshape(-1, length, head_dim)
        if self._first is None:
            self._first = k, v
        else:
            self._later = [*self._later, OwnKeys(0, k, v)]
        out = attend(q, *self._first, self._causal, self._later)
        out = out.view(rows, kv_heads, groups, length, head_dim).permute(0, 3, 1, 2, 4)
        state = residual + F.linear(out.reshape(rows, length, -1), self._out)
        m = F.rms_norm(state, (sizes.hidden,), self._norm, sizes.rms_eps)
        gate, up = F.linear(m, self._gate_up).chunk(2, dim=-1)
        return state + F.linear(F.silu(gate) * up, self._down)


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
    block = UnrolledBlock(sizes, weights, prefix, tokens.shape[1], state.dtype)
    ids = tokens
    for j in range(steps):
        ids = F.pad(ids[:, 1:], (0, 1))
        state = block.step(*enter(ids, state), j)
        yield state
