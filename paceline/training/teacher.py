"""The target as a teacher: a batched Llama forward in which every row has the same position.

Responsible for writing text quickly on a CPU (packed linear weights, static KV cache, no padding, no masks) and for the
features that drafters learn from. Knows no sampling rules, requests, trees or ragged batches: serving runs through
:mod:`paceline.target`, and a test compares the two. Called by :mod:`paceline.training.synth`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.model.linear import Linear
from paceline.model.rope import rotate, rotation_at
from paceline.target import Device
from paceline.training.configuration import parse_configuration, read_config_json
from paceline.training.sizes import ModelSizes, default_tap_layers
from paceline.training.target_weights import read_weights

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
        heads = rows * shape.num_kv_heads
        self.rows = rows
        # Keys are stored transposed: [rows * kv_heads, head_dim, room]; values: [rows * kv_heads, room, head_dim].
        self.keys = [torch.zeros((heads, shape.head_dim, 0), dtype=dtype) for _ in range(shape.num_layers)]
        self.values = [torch.zeros((heads, 0, shape.head_dim), dtype=dtype) for _ in range(shape.num_layers)]

    @property
    def room(self) -> int:
        """Positions allocated."""
        return int(self.values[0].shape[1])

    def reserve(self, length: int) -> None:
        """Allocates ``length`` positions."""
        if length > self.max_length:
            raise TrainingDataError(f"{length} tokens do not fit a cache of {self.max_length}")
        if length <= self.room:
            return
        extra = -(-(length - self.room) // _GROWTH) * _GROWTH
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


class Teacher:
    """A Llama target, packed for batched forward passes.

    Args:
        weights: checkpoint tensors by their transformers names.
        shape: sizes.
        dtype: compute type; bfloat16 is about twice as fast as float32 on CPUs that have it.
        tap_layers: layers whose entering residual stream is returned (``num_layers`` = after the last).
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: ModelSizes,
        dtype: torch.dtype,
        tap_layers: Sequence[int] | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.tap_layers = (
            tuple(tap_layers) if tap_layers is not None else default_tap_layers(shape.num_layers)
        )
        take = lambda name: weights[name].to(dtype)  # noqa: E731
        self.embedding = take("model.embed_tokens.weight")  # [vocab, hidden]
        head = weights.get("lm_head.weight")
        self.head_weight = self.embedding if head is None else head.to(dtype)  # [vocab, hidden]
        pack = Device.parse("cpu").pack
        self._head = pack(self.head_weight)
        self.final_norm = take("model.norm.weight")
        self._layers: list[tuple[Tensor, Linear, Linear, Tensor, Linear, Linear]] = []
        for i in range(shape.num_layers):
            p = f"model.layers.{i}."
            qkv = torch.cat([take(p + f"self_attn.{x}_proj.weight") for x in "qkv"])
            gate_up = torch.cat([take(p + f"mlp.{x}_proj.weight") for x in ("gate", "up")])
            self._layers.append(
                (
                    take(p + "input_layernorm.weight"),
                    pack(qkv),
                    pack(take(p + "self_attn.o_proj.weight")),
                    take(p + "post_attention_layernorm.weight"),
                    pack(gate_up),
                    pack(take(p + "mlp.down_proj.weight")),
                )
            )

    @classmethod
    def load(cls, model_dir: Path, dtype: torch.dtype, tap_layers: Sequence[int] | None = None) -> Teacher:
        """Loads a transformers Llama directory (``config.json`` and safetensors).

        Raises:
            TrainingDataError: the model is not one that the teacher computes; see :func:`llama_sizes`.
        """
        shape = llama_sizes(read_config_json(model_dir))
        return cls(read_weights(model_dir), shape, dtype, tap_layers)

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
        s = self.shape
        rows, count = tokens.shape
        start = cache.length
        end = start + count
        groups = s.num_heads // s.num_kv_heads
        cos, sin = rotation_at(s.rope_theta, s.head_dim, start, count, self.dtype)
        scale = s.head_dim**-0.5
        cache.reserve(end)
        # [groups * count, room]: row t of each group sees positions up to start + t
        mask = torch.full((count, cache.room), -torch.inf, dtype=self.dtype).triu(start + 1).repeat(groups, 1)
        split = (s.num_heads + s.num_kv_heads, s.num_kv_heads)
        x = F.embedding(tokens.reshape(-1), self.embedding)  # [rows*count, hidden]
        taps: dict[int, Tensor] = {}
        for i, (norm_in, qkv, out, norm_post, gate_up, down) in enumerate(self._layers):
            if i in self.tap_layers:
                taps[i] = x
            a = qkv(F.rms_norm(x, (s.hidden,), norm_in, s.rms_eps))
            qk, v = a.view(rows, count, -1, s.head_dim).split(split, dim=2)
            qk = rotate(qk, cos, sin)
            q, k = qk.split((s.num_heads, s.num_kv_heads), dim=2)
            keys = cache.keys[i]
            values = cache.values[i]
            keys.unflatten(0, (rows, -1))[..., start:end] = k.permute(0, 2, 3, 1)
            values.unflatten(0, (rows, -1))[:, :, start:end] = v.transpose(1, 2)
            # Grouped heads become query rows: one pass over the keys serves all of a group.
            q = q.view(rows, count, s.num_kv_heads, groups, s.head_dim).permute(0, 2, 3, 1, 4) * scale
            scores = torch.bmm(q.reshape(-1, groups * count, s.head_dim), keys) + mask
            o = torch.bmm(scores.softmax(-1), values).view(rows, s.num_kv_heads, groups, count, s.head_dim)
            o = o.permute(0, 3, 1, 2, 4).reshape(rows * count, -1)
            x = out.add(o, x)
            gate, up = gate_up(F.rms_norm(x, (s.hidden,), norm_post, s.rms_eps)).chunk(2, dim=-1)
            x = down.add(F.silu(gate) * up, x)
        if s.num_layers in self.tap_layers:
            taps[s.num_layers] = x
        cache.length = end
        hidden = F.rms_norm(x, (s.hidden,), self.final_norm, s.rms_eps)
        stacked = torch.stack([taps[i] for i in self.tap_layers], dim=1)
        return hidden.view(rows, count, -1), stacked.view(rows, count, len(self.tap_layers), -1)
