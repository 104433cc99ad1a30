"""Gemma 4's assistant as a draft layer: rows of several sequences, each over its own target's keys and values.

Reads a checkpoint's sizes in Paceline's layout, and runs rows over cache slots that hold the target's keys and values.
It does not know who fills the slots, and knows no chains or trees. Called by `paceline.methods.gemma4_mtp.drafter`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft_layer import LayerOutput, Rows, join_rows
from paceline.draft_layer.torch_layer import TorchOutput
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.gemma4_mtp.model import (
    FULL,
    ORDER,
    SLIDING,
    Gemma4MtpModel,
    Gemma4MtpShape,
    attend_all,
)
from paceline.target import CachedLayer, Device

_NUMBERS = ("backbone", "hidden", "intermediate", "vocab", "num_heads", "sliding_window")


def read_shape(config: DrafterConfig) -> Gemma4MtpShape:
    """The model's sizes.

    Raises:
        CheckpointError: naming the size that is missing or impossible.
    """
    types = config.shape.get("layer_types")
    if not isinstance(types, list) or FULL not in types or any(kind not in (SLIDING, FULL) for kind in types):
        raise CheckpointError(
            f"shape.layer_types must name {SLIDING} and {FULL} layers, one of them full at least"
        )
    kinds = sorted(set(types))
    is_clustered = config.shape.get("num_clusters") not in (None, 0)
    shape = Gemma4MtpShape(
        **{name: config.size(name) for name in _NUMBERS},
        layer_types=tuple(types),
        head_dims={kind: _whole(config, "head_dims", kind) for kind in kinds},
        rope_thetas={kind: positive(*_by_kind(config, "rope_thetas", kind)) for kind in kinds},
        rotary_fractions={
            kind: positive(*_by_kind(config, "rotary_fractions", kind), most=1) for kind in kinds
        },
        rms_eps=positive(config.shape.get("rms_eps", 1e-6), "shape.rms_eps"),
        num_clusters=config.size("num_clusters") if is_clustered else 0,
        num_selected=config.size("num_selected") if is_clustered else 0,
    )
    for kind, head_dim in shape.head_dims.items():
        if head_dim % 2:
            raise CheckpointError(
                f"shape.head_dims.{kind} must be even, because rotation takes a head's entries in pairs"
            )
    if shape.num_clusters and (shape.vocab % shape.num_clusters or shape.num_selected > shape.num_clusters):
        raise CheckpointError(
            f"shape.num_clusters {shape.num_clusters} must divide {shape.vocab} tokens and be at least "
            f"{shape.num_selected}"
        )
    return shape


def read_cached_layers(config: DrafterConfig) -> dict[str, CachedLayer]:
    """The target's layers whose keys and values are read, by type of layer, in the order of their feature columns.

    Raises:
        CheckpointError: as for :func:`read_shape`.
    """
    shape, layers = read_shape(config), {}
    for kind in sorted(set(shape.layer_types)):
        kv_heads = _whole(config, "kv_heads", kind)
        if shape.num_heads % kv_heads:
            raise CheckpointError(
                f"shape.num_heads {shape.num_heads} is no multiple of shape.kv_heads.{kind}"
            )
        window = shape.sliding_window + 1 if kind == SLIDING else 0
        layer, name = _by_kind(config, "kv_layers", kind)
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise CheckpointError(f"{name} must be a layer of the target, not {layer!r}")
        layers[kind] = CachedLayer(layer, kv_heads, shape.head_dims[kind], window)
    return layers


def check_order(tensors: dict[str, Tensor], shape: Gemma4MtpShape) -> None:
    """Convert the order of a clustered head's tokens to int64, if there is one.

    Raises:
        CheckpointError: the order does not name every token once.
    """
    if not shape.num_clusters:
        return
    order = tensors[ORDER]
    if order.is_floating_point() or order.is_complex() or order.dtype == torch.bool:
        raise CheckpointError(f"{ORDER} must hold whole numbers, not {order.dtype}")
    order = order.to(torch.int64)
    if not torch.equal(order.sort().values, torch.arange(shape.vocab)):
        raise CheckpointError(f"{ORDER} does not name every token once")
    tensors[ORDER] = order


def positive(value: object, name: str, most: float = math.inf) -> float:
    """A number above 0 and at most `most`.

    Raises:
        CheckpointError: it is no such number; names the value.
    """
    largest = min(most, sys.float_info.max)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= largest:
        bound = "" if most == math.inf else f" of at most {most:g}"
        raise CheckpointError(f"{name} must be a positive number{bound}, not {value!r}")
    return float(value)


def _whole(config: DrafterConfig, name: str, kind: str) -> int:
    value, called = _by_kind(config, name, kind)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{called} must be a positive whole number, not {value!r}")
    return value


def _by_kind(config: DrafterConfig, name: str, kind: str) -> tuple[object, str]:
    """A value by type of layer, None where there is none; and the value's name."""
    values = config.shape.get(name)
    return values.get(kind) if isinstance(values, Mapping) else None, f"shape.{name}.{kind}"


class Gemma4MtpLayer:
    """The model over cache slots; see :class:`paceline.draft_layer.DraftLayer`.

    A row with `depth` draft tokens up to its own belongs to a draft from committed length `position + 2 - depth`. It
    sees the rows before the last committed token and has that token's position.

    Attributes:
        cached: layer of the slots, by type of layer.

    Args:
        shape: sizes.
        tensors: of the model.
        embedding: the target's, `[vocab, backbone]`.
        embedding_scale: factor that the target multiplies its embeddings by.
        cached: the target's layers that are read, by type of layer.
        device: where it runs.
        dtype: to compute in.
    """

    def __init__(
        self,
        shape: Gemma4MtpShape,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        embedding_scale: float,
        cached: Mapping[str, CachedLayer],
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.hidden, self.dtype = shape, shape.backbone, dtype
        self.where = device.torch_device
        self.values_are_keys = False
        self.num_kv_heads = max(layer.num_kv_heads for layer in cached.values())
        self.head_dim = max(layer.head_dim for layer in cached.values())
        self.cached: Mapping[str, int] = {kind: index for index, kind in enumerate(cached)}
        own = {
            name: tensor.to(self.where, tensor.dtype if tensor.dtype == torch.int64 else dtype)
            for name, tensor in tensors.items()
        }
        self._model = Gemma4MtpModel(shape, own, device)
        self._embedding = embedding.to(self.where, dtype)
        self._embedding_scale = torch.tensor(embedding_scale).to(dtype).to(self.where)

    @property
    def num_scored(self) -> int:
        """Tokens of a row that get a logit."""
        shape = self.shape
        return shape.num_selected * (shape.vocab // shape.num_clusters) if shape.num_clusters else shape.vocab

    def forward(self, rows: Sequence[Rows], wanted: Sequence[int]) -> LayerOutput:
        """Run rows of several sequences; nothing is written to their slots."""
        tokens = torch.tensor([token for part in rows for token in part.tokens], device=self.where)
        ends = []  # rows of the slot that each part's rows see
        for part in rows:
            depth = 0 if part.depths is None else part.depths[0]
            ends.append(part.positions[0] + 1 - depth)
        counts = [part.num_rows for part in rows]
        positions = torch.tensor(
            [end for end, count in zip(ends, counts, strict=True) for _ in range(count)], device=self.where
        )

        def attend(kind: str, queries: Tensor) -> Tensor:
            mixed = []
            for part, end, own in zip(rows, ends, queries.split(counts), strict=True):
                first = max(0, end - self.shape.sliding_window - 1) if kind == SLIDING else 0
                keys, values = part.slot.view(self.cached[kind], first, end)
                mixed.append(attend_all(own, keys[0], values[0]))
            return join_rows(mixed)

        embedded = F.embedding(tokens, self._embedding) * self._embedding_scale
        states = join_rows([part.states for part in rows])
        output, carried = self._model.forward(embedded, states, positions, attend)
        selected = output if len(wanted) == output.shape[0] else output[list(wanted)]
        return TorchOutput(carried, self._model.logits(selected).float())
