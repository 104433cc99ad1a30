"""Follows sequences for drafters over the target's features: committed tokens, features to run, a cache slot each.

Tokens and features may arrive in any order. How drafts are made is in the classes that build on this one: drafters
that continue from their own output, block drafters, and P-EAGLE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.draft_layer import LayerSizes
from paceline.methods.drafter import DrafterError, UnknownDraftSequenceError
from paceline.target import Device, TapSpec
from paceline.target.kv.cache import KVCache
from paceline.target.kv.slot import KVLayout, Slot


@dataclass(slots=True)
class FollowedSequence:
    """A sequence: its tokens, features not yet run, and its slot."""

    tokens: list[int]
    slot: Slot
    slot_id: int
    pending: list[Tensor] = field(default_factory=list)  # features not yet run, each [n, hidden]
    num_features: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether features of all positions but the root's have arrived."""
        return self.num_features >= len(self.tokens) - 1 and len(self.tokens) > 1


State = TypeVar("State", bound=FollowedSequence)


class FeatureFollower(ABC, Generic[State]):
    """Follows sequences for a drafter with a layer of its own, as `paceline.methods.drafter.Drafter` says.

    Args:
        layer: sizes of the layer that runs the features.
        tap: what is read from the target.
        max_positions: longest text that is drafted for.
        device: where the layer runs.
        num_layers: layers of the cache.
    """

    def __init__(
        self, layer: LayerSizes, tap: TapSpec, max_positions: int, device: Device, num_layers: int = 1
    ) -> None:
        self._sizes = layer
        self.tap: TapSpec | None = tap
        self.max_positions = max_positions
        self.longest_draft: int | None = None
        layout = KVLayout(
            num_layers,
            layer.num_kv_heads,
            layer.head_dim,
            layer.dtype,
            device.torch_device,
            values_are_keys=layer.values_are_keys,
        )
        self._cache = KVCache(layout)
        self._sequences: dict[int, State] = {}

    @abstractmethod
    def _begin(self, tokens: list[int], slot: Slot, slot_id: int) -> State:
        """The state of a new sequence."""

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self.close(sequence_id)
        # A reused slot may have grown in inference mode; such tensors can only be written in that mode.
        with torch.inference_mode():
            slot_id = self._cache.open(len(tokens) + 64)
        self._sequences[sequence_id] = self._begin(list(tokens), self._cache.get(slot_id), slot_id)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._cache.close(state.slot_id)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        state = self._get(sequence_id)
        known = len(state.tokens)
        if start > known:
            raise DrafterError(f"sequence {sequence_id}: tokens {known} to {start - 1} are missing")
        state.tokens.extend(tokens[known - start :])

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features."""
        state = self._get(sequence_id)
        skip = state.num_features - start
        if skip < 0:
            raise DrafterError(
                f"sequence {sequence_id}: features from {state.num_features} to {start - 1} are missing"
            )
        if features.ndim != 2 or features.shape[1] != self._sizes.hidden:
            raise DrafterError(f"features must be [n, {self._sizes.hidden}], not {list(features.shape)}")
        if skip >= features.shape[0]:
            return
        fresh = features[skip:].to(device=self._sizes.where, dtype=self._sizes.dtype)
        state.pending.append(fresh)
        state.num_features += int(fresh.shape[0])

    def _get(self, sequence_id: int) -> State:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None
