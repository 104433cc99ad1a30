"""Gemma 4's multi-token prediction model ("assistant"): a small decoder that reads the target's keys and values.

Its layers have queries only. Sliding layers attend to the keys and values of the target's last sliding layer, full
layers to those of its last full layer. A step reads the last token's embedding in the target's table and a hidden state
of the target's width: first the target's final-norm output, then the model's own projection. All steps of a draft have
one position, the last committed token's, one behind the newest cached row, and add nothing to any cache. So rows of a
tree are independent of one another. Tensors have the names of transformers' `Gemma4AssistantForCausalLM`.

This file has the tensors and the step for inference; `layer.py` attends to cache slots. Training runs the same layers
in `paceline.training.block`. See docs/methods/gemma4_mtp.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.gemma4_mtp.clustered_head import ClusteredHead
from paceline.model.block import BlockShape, BlockWeights
from paceline.model.device import Device
from paceline.model.norm import RmsNorm
from paceline.model.projection import Projection
from paceline.model.torch_block import Rope, Scoring, TorchBlock

SLIDING, FULL = "sliding_attention", "full_attention"
ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Gemma4MtpShape:
    """Sizes of the model.

    Attributes:
        backbone: width of the target's hidden states.
        hidden: width of the model's own stream.
        layer_types: `SLIDING` or `FULL`, layer by layer.
        head_dims: width of a head, by type of layer; the target's.
        sliding_window: how far back sliding layers see: this many rows before the newest, and it.
        rope_thetas: base of the rotary frequencies, by type of layer.
        rotary_fractions: fraction of a head's pairs that are rotated, by type of layer.
        num_clusters: of the clustered head; 0 where the head is dense.
        num_selected: clusters whose tokens are scored.
    """

    backbone: int
    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    layer_types: tuple[str, ...]
    head_dims: Mapping[str, int]
    sliding_window: int
    rope_thetas: Mapping[str, float]
    rotary_fractions: Mapping[str, float]
    rms_eps: float
    num_clusters: int = 0
    num_selected: int = 0

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors by public name; the output head is the model's own embedding."""
        d = self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "pre_projection.weight": (d, 2 * self.backbone),
            "post_projection.weight": (self.backbone, d),
            "model.embed_tokens.weight": (self.vocab, d),
            "model.norm.weight": (d,),
        }
        for index, kind in enumerate(self.layer_types):
            width = self.num_heads * self.head_dims[kind]
            own: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj.weight": (width, d),
                "self_attn.q_norm.weight": (self.head_dims[kind],),
                "self_attn.o_proj.weight": (d, width),
                "mlp.gate_proj.weight": (self.intermediate, d),
                "mlp.up_proj.weight": (self.intermediate, d),
                "mlp.down_proj.weight": (d, self.intermediate),
                "input_layernorm.weight": (d,),
                "post_attention_layernorm.weight": (d,),
                "pre_feedforward_layernorm.weight": (d,),
                "post_feedforward_layernorm.weight": (d,),
                "layer_scalar": (1,),
            }
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
        if self.num_clusters:
            shapes["masked_embedding.centroids.weight"] = (self.num_clusters, d)
            shapes[ORDER] = (self.vocab,)
        return shapes


def rotary_frequencies(head_dim: int, theta: float, fraction: float) -> Tensor:
    """Angles per position of a head's pairs, float32 `[head_dim / 2]`; 0 for pairs that are not rotated.

    The exponents count over the whole head, however few of its pairs are rotated ("proportional").
    """
    rotated = int(fraction * head_dim // 2)
    frequencies = theta ** (-torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim)
    return F.pad(frequencies, (0, head_dim // 2 - rotated))


Attend = Callable[[str, Tensor], Tensor]
"""Attention of a type of layer over the target's keys and values: rotated queries `[n, heads, head_dim]` in,
`[n, heads * head_dim]` out."""


class Gemma4MtpModel:
    """The model for inference, whatever it attends to.

    Args:
        shape: sizes.
        tensors: by public name, exactly those of :meth:`Gemma4MtpShape.parameter_shapes`, in the type to compute in.
        device: where it runs.
    """

    def __init__(
        self, shape: Gemma4MtpShape, tensors: Mapping[str, Tensor], device: Device | None = None
    ) -> None:
        self.shape = shape
        device = device or Device("cpu")
        table, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        layers = range(len(shape.layer_types))
        self._blocks = [
            TorchBlock(_block_weights(shape, tensors, index), device, norm.dtype, index) for index in layers
        ]
        self._scalars = [tensors[f"model.layers.{index}.layer_scalar"] for index in layers]
        self._pre, self._post = (
            device.pack(tensors[f"{name}_projection.weight"]) for name in ("pre", "post")
        )
        self._norm = RmsNorm(norm, shape.rms_eps)
        self._head: Callable[[Tensor], Tensor]
        if shape.num_clusters:
            centroids, order = tensors["masked_embedding.centroids.weight"], tensors[ORDER]
            self._head = ClusteredHead(centroids, order, table, shape.num_selected).logits
        else:
            self._head = device.pack(table)
        self._frequencies = {
            kind: rotary_frequencies(
                shape.head_dims[kind], shape.rope_thetas[kind], shape.rotary_fractions[kind]
            ).to(table.device)
            for kind in set(shape.layer_types)
        }

    def forward(
        self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run rows that do not see one another.

        Args:
            embedded: `[n, backbone]`, of each row's last token in the target's table, as the target scales it.
            state: `[n, backbone]`.
            positions: of the rows, `[n]`: committed tokens less one, throughout a draft.
            attend: attention over the target's keys and values.

        Returns:
            What the head reads, `[n, hidden]`, and what the next step reads as `state`, `[n, backbone]`.
        """
        ropes = {kind: self._rope(kind, positions, embedded.dtype) for kind in self._frequencies}
        kinds = self.shape.layer_types

        def attention(queries: Tensor, _: Tensor, layer: int, __: Scoring) -> Tensor:
            return attend(kinds[layer], queries[:, 0])

        stream = self._pre(torch.cat((embedded, state), dim=-1))
        for kind, block, scalar in zip(kinds, self._blocks, self._scalars, strict=True):
            stream = block.forward(stream, ropes[kind], attention) * scalar
        output = self._norm(stream)
        return output, self._post(output)

    def logits(self, output: Tensor) -> Tensor:
        """`[n, hidden] -> [n, vocab]`; minus infinity where the clustered head scores nothing."""
        return self._head(output)

    def _rope(self, kind: str, positions: Tensor, dtype: torch.dtype) -> Rope:
        angles = positions[:, None].float() * self._frequencies[kind]
        cos, sin = angles.cos(), angles.sin()
        cosines, signed_sines = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cosines.unsqueeze(1).to(dtype), signed_sines.unsqueeze(1).to(dtype)


def _block_weights(shape: Gemma4MtpShape, tensors: Mapping[str, Tensor], index: int) -> BlockWeights:
    """Layer `index`: queries alone, in the checkpoint's order, which a key head for each query head leaves as it is."""
    kind, prefix = shape.layer_types[index], f"model.layers.{index}."

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    return BlockWeights(
        shape=BlockShape(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim=shape.head_dims[kind],
            norm_eps=shape.rms_eps,
            attention_scale=1.0,
            activation="gelu_pytorch_tanh",
            has_qk_norm=True,
            has_sandwich_norms=True,
            has_own_keys=False,
        ),
        attention_norm=get("input_layernorm"),
        qkv=Projection(get("self_attn.q_proj")),
        qk_norm=get("self_attn.q_norm").expand(shape.num_heads, -1),
        out=Projection(get("self_attn.o_proj")),
        post_attention_norm=get("post_attention_layernorm"),
        mlp_norm=get("pre_feedforward_layernorm"),
        gate_up=Projection.join([Projection(get("mlp.gate_proj")), Projection(get("mlp.up_proj"))]),
        down=Projection(get("mlp.down_proj")),
        post_mlp_norm=get("post_feedforward_layernorm"),
    )


def attend_all(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of rows that all see the same keys, with scale 1: the norm of the queries contains the scale.

    Args:
        queries: `[n, heads, head_dim]`; heads that share a key head are neighbours.
        keys: `[kv_heads, rows, head_dim]`, possibly of another type.
        values: `[kv_heads, rows, head_dim]`.

    Returns:
        `[n, heads * head_dim]`.
    """
    n, heads, dim = queries.shape
    # Query heads that share a key head become rows of it, so that keys are read once.
    folded = queries.view(n, keys.shape[0], -1, dim).transpose(0, 1).reshape(1, keys.shape[0], -1, dim)
    mixed = F.scaled_dot_product_attention(folded.to(keys.dtype), keys[None], values[None], scale=1.0)[0]
    return mixed.to(queries.dtype).view(keys.shape[0], n, -1).transpose(0, 1).reshape(n, heads * dim)
