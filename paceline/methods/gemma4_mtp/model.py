"""Gemma 4's multi-token prediction model ("assistant"): a small decoder that reads the target's keys and values.

Its layers have queries only: sliding ones attend to the keys and values of the target's last sliding layer, the full
one to those of its last full layer. What a step reads is the last token's embedding in the target's table and a hidden
state of the target's width, at first the target's final-norm output and then the model's own projection. All steps of a
draft stand at one position, the last committed token's, one behind the newest cached row, and add nothing to any cache:
rows of a tree are independent of one another. Tensors bear the names of transformers' `Gemma4AssistantForCausalLM`.

Responsible for the tensors, the step in torch operators, and the clustered head. Knows nothing of how keys and values
come here: `gemma4_mtp.py` serves it, and training runs it over whole texts. See docs/methods/gemma4_mtp.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
        rotary_fractions: share of a head's pairs that are turned, by type of layer.
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


class ClusteredHead:
    """An output head that scores the tokens of the likeliest clusters alone.

    With 2,048 clusters of 128 tokens and 32 of them selected, 6,144 products of a row in place of 262,144.

    Args:
        centroids: `[clusters, hidden]`.
        order: int64 `[vocab]`, token ids, cluster by cluster, all of one size.
        table: `[vocab, hidden]`, rows by token id.
        num_selected: clusters whose tokens are scored.
    """

    def __init__(self, centroids: Tensor, order: Tensor, table: Tensor, num_selected: int) -> None:
        self._centroids, self._num_selected = centroids, num_selected
        self._vocab = table.shape[0]
        self._members = order.view(centroids.shape[0], -1)  # [clusters, tokens of each]
        # Rows in the order of clusters, so that a cluster is read in one piece: row by row it took ten times as long.
        self._rows = table[order].view(centroids.shape[0], -1)  # [clusters, tokens of each * hidden]

    def candidates(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that are scored and their logits, `[n, candidates]` each: int64 ids in no order, and `state`'s type.

        Args:
            state: `[n, hidden]`.
        """
        clusters = F.linear(state, self._centroids).topk(self._num_selected, dim=-1).indices
        ids = self._members[clusters].flatten(1)
        rows = self._rows.index_select(0, clusters.flatten()).view(*ids.shape, state.shape[-1])
        return ids, torch.bmm(rows, state.unsqueeze(-1)).squeeze(-1)

    def logits(self, state: Tensor) -> Tensor:
        """`[n, vocab]`; minus infinity for tokens that were not scored, which so have no probability."""
        ids, scores = self.candidates(state)
        return state.new_full((state.shape[0], self._vocab), -torch.inf).scatter_(1, ids, scores)


def rotary_frequencies(head_dim: int, theta: float, share: float) -> Tensor:
    """Angles per position of a head's pairs, float32 `[head_dim / 2]`; 0 for pairs that are not turned.

    The exponents count over the whole head, however few of its pairs are turned ("proportional").
    """
    turned = int(share * head_dim // 2)
    frequencies = theta ** (-torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim)
    return F.pad(frequencies, (0, head_dim // 2 - turned))


Attend = Callable[[str, Tensor], Tensor]
"""Attention of a type of layer over the target's keys and values: turned queries `[..., heads, head_dim]` in,
`[..., heads * head_dim]` out."""


class Gemma4MtpModel:
    """The model, whatever it attends to and whatever multiplies its matrices.

    Args:
        shape: sizes.
        tensors: by public name, exactly those of :meth:`Gemma4MtpShape.parameter_shapes`, in the type to compute in.
        pack: makes a linear map of a matrix; None multiplies with it as it is.
    """

    def __init__(
        self,
        shape: Gemma4MtpShape,
        tensors: Mapping[str, Tensor],
        pack: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.shape = shape
        self._tensors = dict(tensors)
        table = self._tensors.pop("model.embed_tokens.weight")  # the head has it in an order of its own
        make = pack or (lambda weight: lambda x: F.linear(x, weight))
        self._linear = {
            name.removesuffix(".weight"): make(tensors[name])
            for name in tensors
            if name.endswith(("_proj.weight", "_projection.weight"))
        }
        self._head: ClusteredHead | None = None
        self._dense: Callable[[Tensor], Tensor] | None = None
        if shape.num_clusters:
            self._head = ClusteredHead(
                tensors["masked_embedding.centroids.weight"],
                tensors[ORDER],
                table,
                shape.num_selected,
            )
        else:
            self._dense = make(table)
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
            embedded: `[..., backbone]`, of each row's last token in the target's table, as the target scales it.
            state: `[..., backbone]`.
            positions: of the rows, `[...]`: committed tokens less one, throughout a draft.
            attend: attention over the target's keys and values.

        Returns:
            What the head reads, `[..., hidden]`, and what the next step reads as `state`, `[..., backbone]`.
        """
        turns = {kind: self._turns(kind, positions, embedded.dtype) for kind in self._frequencies}
        stream = self._linear["pre_projection"](torch.cat((embedded, state), dim=-1))
        for index, kind in enumerate(self.shape.layer_types):
            stream = self._layer(f"model.layers.{index}.", kind, stream, turns[kind], attend)
        output = self._norm("model.norm", stream)
        return output, self._linear["post_projection"](output)

    def logits(self, output: Tensor) -> Tensor:
        """`[n, hidden] -> [n, vocab]`; minus infinity where the clustered head scores nothing."""
        if self._head is not None:
            return self._head.logits(output)
        assert self._dense is not None
        return self._dense(output)

    def _turns(self, kind: str, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[..., 1, head_dim]` each."""
        angles = positions[..., None].float() * self._frequencies[kind]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _layer(
        self, prefix: str, kind: str, stream: Tensor, turns: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        read = self._norm(prefix + "input_layernorm", stream)
        mixed = attend(kind, self._queries(prefix + "self_attn.", kind, read, turns))
        mixed = self._linear[prefix + "self_attn.o_proj"](mixed)
        stream = stream + self._norm(prefix + "post_attention_layernorm", mixed)
        read = self._norm(prefix + "pre_feedforward_layernorm", stream)
        gate, up = (self._linear[f"{prefix}mlp.{name}_proj"](read) for name in ("gate", "up"))
        down = self._linear[prefix + "mlp.down_proj"](F.gelu(gate, approximate="tanh") * up)
        stream = stream + self._norm(prefix + "post_feedforward_layernorm", down)
        return stream * self._tensors[prefix + "layer_scalar"]

    def _queries(self, prefix: str, kind: str, read: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """`[..., heads, head_dim]`, normed head by head and turned."""
        dim, (cos, sin) = self.shape.head_dims[kind], turns
        queries = self._linear[prefix + "q_proj"](read).unflatten(-1, (self.shape.num_heads, dim))
        queries = F.rms_norm(queries, (dim,), self._tensors[prefix + "q_norm.weight"], self.shape.rms_eps)
        half = dim // 2
        return queries * cos + torch.cat((-queries[..., half:], queries[..., :half]), dim=-1) * sin

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[name + ".weight"], self.shape.rms_eps)


def attend_all(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of rows that all see the same keys; its scale is 1, as the norm of queries has it.

    Args:
        queries: `[n, heads, head_dim]`; heads that share a key head stand side by side.
        keys: `[kv_heads, rows, head_dim]`, maybe of another type.
        values: `[kv_heads, rows, head_dim]`.

    Returns:
        `[n, heads * head_dim]`.
    """
    n, heads, dim = queries.shape
    # Query heads that share a key head become rows of it, so that keys are read once.
    folded = queries.view(n, keys.shape[0], -1, dim).transpose(0, 1).reshape(1, keys.shape[0], -1, dim)
    mixed = F.scaled_dot_product_attention(folded.to(keys.dtype), keys[None], values[None], scale=1.0)[0]
    return mixed.to(queries.dtype).view(keys.shape[0], n, -1).transpose(0, 1).reshape(n, heads * dim)
