"""The target as a teacher: a batched Llama forward in which every row has the same position.

Responsible for writing text quickly on a CPU (static KV cache, no padding) and for the features that drafters learn
from. Its blocks are those that serving runs; the cache of a static batch is its own. Knows no sampling rules, requests,
trees or ragged batches. Called by :mod:`paceline.training.synth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.model.architecture import Architecture
from paceline.model.decoder_weights import DecoderWeights
from paceline.model.norm import RmsNorm
from paceline.model.rope import rotation_at
from paceline.model.torch_block import Scoring, TorchBlock
from paceline.model.weights import SafetensorsDir
from paceline.target import Device
from paceline.training.configuration import parse_configuration, read_config_json
from paceline.training.sizes import ModelSizes, default_tap_layers

_SUPPORTED = ("llama",)


def llama_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Sizes of a ``config.json`` of the Llama family, which the teacher computes.

    Raises:
        TrainingDataError: another family, or scaled rotary positions.
    """
    if config.get("model_type") not in _SUPPORTED:
        raise TrainingDataError(
            f"model_type {config.get('model_type')!r}: the teacher runs {', '.join(_SUPPORTED)} alone. A target of "
            "another family writes with `paceline data continue`, and `paceline data features` adds what drafters "
            "learn from"
        )
    # Older files say `rope_scaling`.
    rope_type = parse_configuration(config).rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise TrainingDataError(f"rope_type {rope_type!r} is not supported by the teacher")
    return ModelSizes.from_config(config)


_GROWTH = 48  # positions; growing copies the cache, a larger step multiplies more masked positions


class TeacherCache:
    """Keys and values of one static batch. All rows have the same length; :meth:`compact` removes rows.

    The buffers of each layer stay contiguous and are multiplied whole, with unused positions masked. The CPU's batched
    product copies a strided operand first, which took twice the time of the product itself.
    """

    def __init__(self, shape: ModelSizes, rows: int, capacity: int, dtype: torch.dtype) -> None:
        self.max_length = capacity
        self.length = 0
        self._new = 0
        self._groups = shape.num_heads // shape.num_kv_heads
        self._mask = torch.empty(0)
        heads = rows * shape.num_kv_heads
        self.rows = rows
        # Keys are stored transposed: [rows * kv_heads, head_dim, allocated]
        # values: [rows * kv_heads, allocated, head_dim]
        self.keys = [torch.zeros((heads, shape.head_dim, 0), dtype=dtype) for _ in range(shape.num_layers)]
        self.values = [torch.zeros((heads, 0, shape.head_dim), dtype=dtype) for _ in range(shape.num_layers)]

    @property
    def allocated(self) -> int:
        """Positions allocated."""
        return int(self.values[0].shape[1])

    def reserve(self, length: int) -> None:
        """Allocates ``length`` positions."""
        if length > self.max_length:
            raise TrainingDataError(f"{length} tokens do not fit a cache of {self.max_length}")
        if length <= self.allocated:
            return
        extra = -(-(length - self.allocated) // _GROWTH) * _GROWTH
        self.keys = [F.pad(x, (0, extra)) for x in self.keys]
        self.values = [F.pad(x, (0, 0, 0, extra)) for x in self.values]

    def compact(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices, ascending)."""

        def keep(x: Tensor) -> Tensor:
            kept: Tensor = x.unflatten(0, (self.rows, -1)).index_select(0, rows)
            return kept.flatten(0, 1)

        self.keys = [keep(x) for x in self.keys]
        self.values = [keep(x) for x in self.values]
        self.rows = rows.numel()

    def begin(self, count: int) -> None:
        """Make allocated for ``count`` more positions of every row; they count once :meth:`end` is called."""
        self._new = count
        self.reserve(self.length + count)
        # [groups * count, allocated]: row t of a pass sees positions up to length + t.
        hidden = torch.full((count, self.allocated), -torch.inf, dtype=self.values[0].dtype)
        self._mask = hidden.triu(self.length + 1).repeat(self._groups, 1)

    def attend(self, queries: Tensor, keys_values: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """See :class:`paceline.model.torch_block.Attention`; rows of the batch one after the other."""
        rows, count, start = self.rows, self._new, self.length
        groups, kv_heads, head_dim = queries.shape[1:]
        new_keys, new_values = keys_values.view(rows, count, 2, kv_heads, head_dim).unbind(2)
        keys, values = self.keys[layer], self.values[layer]
        keys.unflatten(0, (rows, -1))[..., start : start + count] = new_keys.permute(0, 2, 3, 1)
        values.unflatten(0, (rows, -1))[:, :, start : start + count] = new_values.transpose(1, 2)
        # The heads of a group become rows: one pass over the keys serves all of them.
        q = queries.view(rows, count, groups, kv_heads, head_dim).permute(0, 3, 2, 1, 4) * scoring.scale
        scores = torch.bmm(q.reshape(-1, groups * count, head_dim), keys) + self._mask
        mixed = torch.bmm(scores.softmax(-1), values).view(rows, kv_heads, groups, count, head_dim)
        return mixed.permute(0, 3, 2, 1, 4).reshape(rows * count, -1)

    def end(self) -> None:
        """Count the positions of the pass."""
        self.length += self._new


class Teacher:
    """A Llama target, packed for batched forward passes.

    Args:
        model_dir: a transformers Llama directory (``config.json`` and safetensors).
        dtype: compute type; bfloat16 is about twice as fast as float32 on CPUs that have it.
        tap_layers: layers whose entering residual stream is returned (``num_layers`` = after the last).

    Raises:
        TrainingDataError: the model is not one that the teacher computes; see :func:`llama_sizes`.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, tap_layers: Sequence[int] | None = None) -> None:
        content = read_config_json(model_dir)
        self.shape = shape = llama_sizes(content)
        self.dtype = dtype
        self.tap_layers = (
            tuple(tap_layers) if tap_layers is not None else default_tap_layers(shape.num_layers)
        )
        device = Device.parse("cpu")
        with SafetensorsDir(model_dir) as weights:
            reader = DecoderWeights(Architecture.from_config(parse_configuration(content)), weights, dtype)
            self._embedding = reader.embedding  # [vocab, hidden]
            self._head = device.pack(reader.head)
            self._final_norm = RmsNorm(reader.final_norm.to(dtype), shape.rms_eps)
            self._blocks = [TorchBlock(reader.block(i), device, dtype, i) for i in range(shape.num_layers)]

    def new_cache(self, rows: int, capacity: int) -> TeacherCache:
        """An empty cache for ``rows`` sequences of at most ``capacity`` tokens."""
        if capacity > self.shape.max_positions:
            raise TrainingDataError(
                f"capacity {capacity} exceeds the model's {self.shape.max_positions} positions"
            )
        return TeacherCache(self.shape, rows, capacity, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final-norm hidden ``[n, hidden]`` -> logits ``[n, vocab]`` in the compute type."""
        return self._head(hidden)

    def forward(self, tokens: Tensor, cache: TeacherCache) -> tuple[Tensor, Tensor]:
        """Appends ``tokens`` to every row of the cache.

        Args:
            tokens: ``[rows, count]`` int64; all rows continue at ``cache.length``.
            cache: the batch's keys and values; its length grows by ``count``.

        Returns:
            ``(hidden, taps)``: final-norm hidden ``[rows, count, hidden]`` and taps ``[rows, count, n_taps, hidden]``.
        """
        shape = self.shape
        rows, count = tokens.shape
        cache.begin(count)
        cos, sin = rotation_at(shape.rope_theta, shape.head_dim, cache.length, count, self.dtype)
        half = shape.head_dim // 2
        signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        rope = cos.repeat(rows, 1, 1), signed_sin.repeat(rows, 1, 1)
        x = F.embedding(tokens.reshape(-1), self._embedding)  # [rows * count, hidden]
        taps: dict[int, Tensor] = {}
        for i, block in enumerate(self._blocks):
            if i in self.tap_layers:
                taps[i] = x
            x = block.forward(x, rope, cache.attend)
        if shape.num_layers in self.tap_layers:
            taps[shape.num_layers] = x
        cache.end()
        stacked = torch.stack([taps[i] for i in self.tap_layers], dim=1)
        hidden = self._final_norm(x)
        return hidden.view(rows, count, -1), stacked.view(rows, count, len(self.tap_layers), -1)
