"""Gemma 4's multi-token prediction model ("assistant") as a drafter: it reads the target's own keys and values.

It has no cache of its own but reads the target's: keys and values of the last sliding and the last full layer, for
every committed position but the last, and the final-norm output of the newest. In another process they arrive as
features and are stored in slots here; in the target's process its slots are read in place. All rows of a draft have one
position and write nothing, so chains, trees and outcomes leave nothing to undo. `AutoregressiveDrafter` does the
drafting, and `layer.py` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from paceline.draft_layer import Rows, StableRow
from paceline.methods.autoregressive.drafter import AutoregressiveDrafter
from paceline.methods.autoregressive.sequence import AutoregressiveSequence
from paceline.methods.autoregressive.tree_rule import DynamicRule
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.drafter import DrafterError, DraftRequest
from paceline.methods.gemma4_mtp.layer import (
    Gemma4MtpLayer,
    check_order,
    positive,
    read_cached_layers,
    read_shape,
)
from paceline.methods.target_vocabulary import read_embedding
from paceline.target import CachedLayer, Device, TapSpec
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout, Slot


@dataclass(slots=True)
class FinalNorms:
    """Final-norm outputs of a text's newest positions.

    Attributes:
        first: position of the first row of each chunk.
        rows: `[n, hidden]`; NaN for positions that were not sent.
    """

    first: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def add(self, first: int, rows: Tensor, needed: int) -> None:
        """Add a chunk, and drop rows before position `needed`."""
        skip = min(max(needed - first, 0), len(rows))
        if skip < len(rows):
            self.first.append(first + skip)
            self.rows.append(rows[skip:].clone())  # a view would keep all columns in memory
        while self.first and self.first[0] + len(self.rows[0]) <= needed:
            del self.first[0], self.rows[0]

    def at(self, position: int) -> Tensor | None:
        """`[1, hidden]`, or None."""
        for first, rows in zip(reversed(self.first), reversed(self.rows), strict=True):
            if first <= position < first + len(rows):
                row = rows[position - first : position - first + 1]
                return row if bool(row[0, 0].isfinite()) else None
        return None


@dataclass(slots=True)
class ReadingState(AutoregressiveSequence):
    """State of a sequence.

    Attributes:
        finals: final-norm outputs, from the position before the last committed token on.
        start: committed length that `stable` continues.
    """

    finals: FinalNorms = field(default_factory=FinalNorms)
    start: int = 0


class Gemma4MtpDrafter(AutoregressiveDrafter):
    """Drafts over the target's keys and values; see `paceline.methods.drafter.Drafter`.

    Args:
        layer: the model.
        cached: what is read of the target, by type of layer.
        max_positions: longest text that is drafted for.
        device: where it runs.
    """

    method: ClassVar[str] = "gemma4_mtp"

    def __init__(
        self, layer: Gemma4MtpLayer, cached: dict[str, CachedLayer], max_positions: int, device: Device
    ) -> None:
        tap = TapSpec(norm_final=True, cached=tuple(cached.values()))
        super().__init__(layer, None, layer.num_scored, tap, max_positions, DynamicRule(), device)
        heads = tuple((one.num_kv_heads, one.head_dim) for one in cached.values())
        most = layer.num_kv_heads, layer.head_dim
        self._cache = KVCache(KVLayout(len(heads), *most, layer.dtype, device.torch_device, heads))
        self._model, self._cached = layer, cached
        self._find: Callable[[int], Slot | None] | None = None

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """Keys and values of the target's layers that the checkpoint names, and its final norm."""
        return TapSpec(norm_final=True, cached=tuple(read_cached_layers(config).values()))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; the embedding of rows is the target's."""
        with torch.inference_mode():
            shape, cached = read_shape(config), read_cached_layers(config)
            tensors = load_tensors(directory, shape.parameter_shapes())
            check_order(tensors, shape)
            scale = config.shape.get("embedding_scale", shape.backbone**0.5)
            scale = positive(scale, "shape.embedding_scale")
            embedding = read_embedding(target_dir, shape.vocab, shape.backbone, dtype)
            layer = Gemma4MtpLayer(shape, tensors, embedding, scale, cached, device, dtype)
        return cls(layer, cached, config.size("max_positions"), device)

    def read_in_place(self, find: Callable[[int], Slot | None]) -> None:
        """Read the target's own cache from now on; only the final norm is tapped then.

        Args:
            find: returns the slot of a sequence in this process's target, or None if it has none now. When a draft is
                requested, the slot holds all committed tokens but the last.
        """
        self._find = find
        # From now on, slots here stay empty.
        self._cache = KVCache(KVLayout(1, 1, 1, self._model.dtype, self._model.where))
        self.tap = TapSpec(norm_final=True, last_only=True)
        self._model.cached = {kind: one.layer for kind, one in self._cached.items()}

    def _begin(self, tokens: list[int], slot: Slot, slot_id: int) -> AutoregressiveSequence:
        return ReadingState(tokens, slot, slot_id)

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features: the final norm's output first, then keys and values unless they are read in place."""
        state = self._reading(sequence_id)
        assert self.tap is not None
        width = self.tap.width(self._model.hidden)
        if features.ndim != 2 or features.shape[1] != width:
            raise DrafterError(f"features must be [n, {width}], not {list(features.shape)}")
        if self._find is None:
            skip = state.num_features - start
            if skip < 0:
                missing = f"{state.num_features} to {start - 1}"
                raise DrafterError(f"sequence {sequence_id}: features from {missing} are missing")
            if skip >= features.shape[0]:
                return
            start, features = start + skip, features[skip:]
            self._store(state, features[:, self._model.hidden :])
            state.num_features += int(features.shape[0])
        finals = features[:, : self._model.hidden].to(self._model.where, self._model.dtype)
        state.finals.add(start, finals, len(state.tokens) - 2)

    def _store(self, state: ReadingState, rows: Tensor) -> None:
        """Append keys and values `[n, ...]` of all layers to the slot."""
        with torch.inference_mode():
            count, slot = int(rows.shape[0]), state.slot
            self._cache.reserve([(state.slot_id, count)])
            columns = rows.split([one.width for one in self._cached.values()], dim=1)
            for index, (one, column) in enumerate(zip(self._cached.values(), columns, strict=True)):
                slot.append(index, slot.length, column.view(count, 2 * one.num_kv_heads, one.head_dim))
            slot.length += count

    def _reading(self, sequence_id: int) -> ReadingState:
        state = self._get(sequence_id)
        assert isinstance(state, ReadingState)
        return state

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._reading(request.sequence_id)
        length = len(state.tokens)
        if self._find is not None:
            slot = self._find(request.sequence_id)
            if slot is None or slot.length != length - 1:
                return False
            state.slot = slot
        elif state.num_features < length - 1:
            return False
        return (
            request.num_tokens > 0
            and length > 1
            and state.finals.at(length - 2) is not None
            and length + request.num_tokens <= self.max_positions
        )

    def _reserve(self, states: Sequence[AutoregressiveSequence], num_rows: Sequence[int]) -> None:
        """Rows of drafts are in no cache."""

    def _drop_drafted(self, state: AutoregressiveSequence) -> None:
        """Rows of drafts are in no cache; pending rows of a slot that is read in place are the target's."""

    def _run_stable_rows(self, states: Sequence[AutoregressiveSequence]) -> None:
        """Run the first step of every draft whose committed length differs from the last draft's."""
        behind: list[ReadingState] = []
        rows = []
        for state in states:
            assert isinstance(state, ReadingState)
            length = len(state.tokens)
            if state.start == length:
                continue
            final = state.finals.at(length - 2)
            assert final is not None
            behind.append(state)
            rows.append(Rows(state.slot, state.tokens[-1:], final, [length - 2]))
        if not behind:
            return
        output = self._layer.forward(rows, range(len(rows)))
        for index, state in enumerate(behind):
            state.stable, state.start = StableRow(output, index, index), len(state.tokens)
            state.chain = state.tree = None
