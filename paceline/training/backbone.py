"""A Llama's forward pass that can be differentiated: causal, over right-padded batches, in plain torch.

For objectives that train a whole model, or layers of one. Teachers and serving have faster forwards of their own, and
tests hold them together. Knows nothing of losses; which linear maps are trained, and how, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from paceline.training.attention import Pattern
from paceline.training.rotary import rope_tables, rotate
from paceline.training.sizes import ModelSizes

LinearMap = Callable[[str, Tensor], Tensor]
"""Applies the linear map of a name, such as ``model.layers.0.self_attn.q_proj``, to ``[..., in]``."""

LINEAR_NAMES = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)
"""Linear maps of a layer."""


def final_hidden(
    weights: Mapping[str, Tensor],
    shape: ModelSizes,
    embedding: Tensor,
    tokens: Tensor,
    linear: LinearMap | None = None,
) -> Tensor:
    """Output of the final norm of causal texts.

    Args:
        weights: by transformers name, in the compute type: norms, and what `linear` is not given for.
        shape: sizes; ``num_layers`` layers are run.
        embedding: ``[vocab, hidden]`` in the compute type.
        tokens: int64 ``[rows, length]``. Padding stands behind a row's tokens, so that no token sees it.
        linear: how to apply linear maps; None multiplies with the weights.

    Returns:
        ``[rows, length, hidden]`` in the compute type.
    """
    rope = rope_tables(shape.rope_theta, shape.head_dim, 0, tokens.shape[1], embedding.dtype)
    pattern = Pattern.causal(tokens.shape[1], embedding.dtype)
    return run_layers(weights, shape, F.embedding(tokens, embedding), rope, pattern, linear)


def run_layers(
    weights: Mapping[str, Tensor],
    shape: ModelSizes,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    pattern: Pattern,
    linear: LinearMap | None = None,
) -> Tensor:
    """Output of the final norm of rows that are embedded already.

    Args:
        weights: as in :func:`final_hidden`.
        shape: sizes.
        x: ``[texts, rows, hidden]``.
        rope: cosines and sines of the rows' positions, ``[rows, 1, head_dim]`` or ``[texts, rows, 1, head_dim]``.
        pattern: who sees whom, in the compute type.
        linear: as in :func:`final_hidden`.

    Returns:
        ``[texts, rows, hidden]``.
    """
    apply = linear or (lambda name, x: F.linear(x, weights[name + ".weight"]))
    texts, rows = x.shape[:2]
    cos, sin = rope

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (shape.hidden,), weights[name + ".weight"], shape.rms_eps)

    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        a = norm(layer + "input_layernorm", x)
        q, k, v = (
            apply(layer + f"self_attn.{n}_proj", a).view(texts, rows, -1, shape.head_dim) for n in "qkv"
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + apply(layer + "self_attn.o_proj", pattern.attend(q, k, v))
        m = norm(layer + "post_attention_layernorm", x)
        gate, up = (apply(layer + f"mlp.{n}_proj", m) for n in ("gate", "up"))
        x = x + apply(layer + "mlp.down_proj", F.silu(gate) * up)
    return norm("model.norm", x)
