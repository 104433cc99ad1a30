"""One decoder block in plain torch operators, which autograd can differentiate.

Responsible for norms, projections, rotation, the gated MLP, experts and both residual sums. The caller says what
attention reads, what its result is added to, and how attention is computed: a whole model, a layer that is run again on
its own outputs, and blocks of mask tokens differ in nothing else. Weights are parameters by checkpoint name, so that
gradients reach them. Called by :mod:`paceline.training.backbone` and the training objectives. Inference has forms of
its own; tests compare them with this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.block import BlockShape
from paceline.model.experts import ExpertsShape, route, sum_experts
from paceline.model.latent import LATENT_NORM_EPS, LatentShape
from paceline.model.rope import rotate

LinearMap = Callable[[str, Tensor], Tensor]
"""Applies the linear map of a name, such as ``model.layers.0.self_attn.q_proj``, to ``[..., in]``."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rows' positions, ``[rows, 1, head_dim]`` or ``[texts, rows, 1, head_dim]``."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of rotated and scaled queries ``[texts, rows, heads, head_dim]`` to keys and values
``[texts, rows, kv_heads, head_dim]``: gives ``[texts, rows, heads * head_dim]``."""

LINEAR_NAMES = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)
"""Linear maps of a block."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMS norm of the last dimension.

    Args:
        x: ``[..., width]``.
        weight: ``[width]``.
        eps: added to mean squares.
        offset: added to the weight in float32, before it is rounded to the type of ``x``, as the engine does. bfloat16
            keeps two bits of 1 - 0.99.
    """
    shifted = weight.float() + offset if offset else weight
    return F.rms_norm(x, weight.shape, shifted.to(x.dtype), eps)


class DifferentiableBlock:
    """A decoder block with its weights.

    Args:
        shape: sizes, and what the block's family has.
        weights: tensors by name, in the compute type; norms may have another type.
        prefix: of the block's names, such as ``model.layers.0.``.
        linear: applies linear maps; None multiplies with the weights, and adds biases where there are any.
        norm_offset: added to norm weights.
    """

    def __init__(
        self,
        shape: BlockShape,
        weights: Mapping[str, Tensor],
        prefix: str,
        linear: LinearMap | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        self.shape = shape
        self._weights, self._prefix, self._norm_offset = weights, prefix, norm_offset
        self._apply = linear or self._multiply

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The norm of a name within the block, such as ``input_layernorm``."""
        weight = self._weights[f"{self._prefix}{name}.weight"]
        return rms_norm(x, weight, self.shape.norm_eps, self._norm_offset)

    def heads(self, kind: str, read: Tensor, rotation: Rotation) -> Tensor:
        """Queries, keys or values of some rows, ``[texts, rows, heads, head_dim]``.

        Queries and keys are normed where the family does that, and rotated; queries are scaled.

        Args:
            kind: ``q``, ``k`` or ``v``.
            read: ``[texts, rows, read_width]``.
            rotation: of the rows' positions.
        """
        shape = self.shape
        heads: Tensor = self._linear(f"self_attn.{kind}_proj", read).unflatten(-1, (-1, shape.head_dim))
        if kind == "v":
            return heads
        if shape.has_qk_norm:
            heads = self.norm(f"self_attn.{kind}_norm", heads)
        heads = rotate(heads, *rotation)
        return heads * shape.attention_scale if kind == "q" else heads

    def forward(self, read: Tensor, residual: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The block's output, ``[texts, rows, hidden]``.

        Args:
            read: what attention reads, ``[texts, rows, read_width]``.
            residual: what its result is added to, ``[texts, rows, hidden]``.
            rotation: of the rows' positions.
            attend: who sees whom.
        """
        latent = self.shape.latent
        if latent is not None:
            return self.add_branches(residual, self._attend_latent(latent, read, rotation, attend))
        q, k, v = (self.heads(kind, read, rotation) for kind in "qkv")
        return self.add_branches(residual, attend(q, k, v))

    def _attend_latent(self, sizes: LatentShape, read: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """What heads read, ``[texts, rows, heads * value_dim]``; see :mod:`paceline.model.latent`.

        Keys and values of all heads are computed: rows of whole texts are cheaper so than by absorbed maps.
        """
        shape = self.shape
        if sizes.q_rank:
            narrow = self._latent_norm("q_a_layernorm", self._linear("self_attn.q_a_proj", read))
            queries = self._linear("self_attn.q_b_proj", narrow)
        else:
            queries = self._linear("self_attn.q_proj", read)
        plain, turned = queries.unflatten(-1, (shape.num_heads, -1)).split(
            [sizes.nope_dim, sizes.rope_dim], dim=-1
        )
        latent, key = self._linear("self_attn.kv_a_proj_with_mqa", read).split(
            [sizes.kv_rank, sizes.rope_dim], dim=-1
        )
        if sizes.interleaved:
            turned, key = (torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) for x in (turned, key))
        up = self._linear("self_attn.kv_b_proj", self._latent_norm("kv_a_layernorm", latent))
        plain_keys, v = up.unflatten(-1, (shape.num_heads, -1)).split(
            [sizes.nope_dim, sizes.value_dim], dim=-1
        )
        key = rotate(key.unsqueeze(-2), *rotation).expand(*plain_keys.shape[:-1], -1)
        q = torch.cat([plain, rotate(turned, *rotation)], dim=-1) * shape.attention_scale
        k = torch.cat([plain_keys, key], dim=-1)
        width = max(sizes.key_dim, sizes.value_dim)  # attention takes keys and values of one width
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        mixed: Tensor = attend(q, k, v).unflatten(-1, (shape.num_heads, width))
        return mixed[..., : sizes.value_dim].flatten(-2)

    def _latent_norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._weights[f"{self._prefix}self_attn.{name}.weight"], LATENT_NORM_EPS)

    def add_branches(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Adds the output projection of attention's result, then MLP and experts: ``[texts, rows, hidden]``.

        Args:
            residual: ``[texts, rows, hidden]``.
            mixed: attention's result, ``[texts, rows, heads * head_dim]``.
        """
        experts = self.shape.experts
        is_sandwich = self.shape.has_sandwich_norms
        out = self._linear("self_attn.o_proj", mixed)
        state = residual + (self.norm("post_attention_layernorm", out) if is_sandwich else out)
        m = self.norm("pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm", state)
        if self.shape.intermediate:
            out = self._mlp("mlp." if experts is None else "mlp.shared_experts.", m)
        else:
            out = torch.zeros_like(m)
        if experts is not None:
            if experts.has_shared_gate:
                out = out * self._linear("mlp.shared_expert_gate", m).sigmoid()
            out = out + self._run_experts(experts, m)
        return state + (self.norm("post_feedforward_layernorm", out) if is_sandwich else out)

    def _mlp(self, name: str, m: Tensor) -> Tensor:
        gate, up = self._linear(name + "gate_proj", m), self._linear(name + "up_proj", m)
        return self._linear(name + "down_proj", _ACTIVATIONS[self.shape.activation](gate) * up)

    def _run_experts(self, experts: ExpertsShape, m: Tensor) -> Tensor:
        name = f"{self._prefix}mlp.gate."
        rows = m.flatten(0, -2)
        gate, bias = self._weights[name + "weight"], self._weights.get(name + "e_score_correction_bias")
        weights, chosen = route(rows, gate, bias, experts)
        total = sum_experts(rows, weights, chosen, lambda at, part: self._mlp(f"mlp.experts.{at}.", part))
        return total.view_as(m)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._apply(self._prefix + name, x)

    def _multiply(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))
