"""P-EAGLE (2602.01469): all tokens of a draft from one pass of an EAGLE-3 layer with plain layers above it.

Row `r` of a sequence joins the target's fused feature of position `r` with token `r + 1` and proposes token `r + 2`, as
in EAGLE-3. *Mask* rows follow the last of these *true* rows. They join one shared learned feature with the mask token's
embedding: mask row `d` proposes the token `d` places further. True rows stay in the drafter's cache; mask rows are
dropped once true features arrive. A mask row attends to the true rows and the mask rows before it, so a longer request
runs only the new rows.

A mask row's proposal does not depend on the tokens drafted before it; `OnePassRound` makes chains, draws and trees of
such rows. Nothing can be drafted past an outcome before its features arrive.

`fc` runs on the target's side (the tap's projection). The mask rows' feature passes through it once, when a checkpoint
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.draft_layer import DraftLayer, Rows, join_rows
from paceline.drafts import DraftEntry
from paceline.methods.backend import make_layer
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, load_tensor, load_tensors
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.eagle.fused_layer import parameter_shapes, read_layer
from paceline.methods.feature_follower import FeatureFollower, FollowedSequence
from paceline.methods.one_pass.round import OnePassRound, RoundRequest, round_entries
from paceline.methods.target_vocabulary import read_draft_ids
from paceline.target import Device, TapSpec
from paceline.target.kv.slot import Slot


def p_eagle_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/p_eagle.md)."""
    width, vocab = config.size("target_hidden"), config.size("target_vocab")
    shapes = parameter_shapes(config)
    shapes["embed_tokens.weight"] = (vocab, width)
    shapes["mask_hidden"] = (1, 1, len(config.tap_layers()) * width)
    return shapes


def mask_token(config: DrafterConfig) -> int:
    """Id whose embedding represents a token that is not known yet.

    Raises:
        CheckpointError: the target has no such token.
    """
    token, vocab = config.shape.get("mask_token"), config.size("target_vocab")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise CheckpointError(f"shape.mask_token must be a token from 0 to {vocab - 1}, not {token!r}")
    return token


@dataclass(slots=True)
class PEagleSequence(FollowedSequence):
    """State of a sequence: its tokens and features, and the round behind them."""

    round: OnePassRound = field(default_factory=OnePassRound)

    @property
    def num_waiting(self) -> int:
        """True rows that can be run."""
        return min(self.num_features, len(self.tokens) - 1) - self.slot.length


class PEagleDrafter(FeatureFollower[PEagleSequence]):
    """Drafts with parallel mask rows; see `paceline.methods.drafter.Drafter`.

    Args:
        layer: EAGLE-3's, with its plain blocks.
        num_layers: blocks of the layer.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        draft_vocab: draft ids.
        masked: `[1, hidden]`, the mask rows' feature behind `fc`.
        mask_token: the mask rows' token.
        num_depths: depths that it was trained for, the length of the longest chain.
        tap: what is read from the target.
        max_positions: longest text that is drafted for.
        device: where the layer runs.
    """

    method: ClassVar[str] = "p_eagle"

    def __init__(
        self,
        layer: DraftLayer,
        num_layers: int,
        draft_ids: Tensor | None,
        draft_vocab: int,
        masked: Tensor,
        mask_token: int,
        num_depths: int,
        tap: TapSpec,
        max_positions: int,
        device: Device,
    ) -> None:
        super().__init__(layer, tap, max_positions, device, num_layers)
        self._layer = layer
        self._draft_ids = draft_ids
        self._target_id_of: list[int] | range = (
            range(draft_vocab) if draft_ids is None else draft_ids.tolist()
        )
        self._masked = masked
        self._mask_token = mask_token
        self.num_depths = self.longest_draft = num_depths

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: its layers, fused by `fc` on the target's side."""
        return TapSpec(layers=config.tap_layers(), projection=load_tensor(directory, "fc.weight"))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> PEagleDrafter:
        """Load a checkpoint; its embedding is its own, and nothing is read from the target's directory."""
        with torch.inference_mode():
            tensors = load_tensors(directory, p_eagle_shapes(config))
            embedding = tensors["embed_tokens.weight"].to(device.torch_device, dtype)
            weights = read_layer(config, tensors, embedding, dtype)
            projection = tensors["fc.weight"]
            masked = tensors["mask_hidden"].float().view(1, -1) @ projection.float().T
            return cls(
                make_layer(weights, device),
                len(weights.blocks),
                read_draft_ids(config, tensors["d2t"], device.torch_device),
                config.size("draft_vocab"),
                masked.to(device.torch_device, dtype),
                mask_token(config),
                config.size("num_depths"),
                TapSpec(layers=config.tap_layers(), projection=projection),
                config.size("max_positions"),
                device,
            )

    def _begin(self, tokens: list[int], slot: Slot, slot_id: int) -> PEagleSequence:
        return PEagleSequence(tokens, slot, slot_id)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens in a row, all sequences in one pass.

        A request for longer paths than the drafter was trained for gets the longest that it has, and further nodes.
        """
        with torch.inference_mode():
            able = [r for r in requests if self._can_draft(r)]
            states = [self._get(r.sequence_id) for r in able]
            self._run([(s, self._depth(r)) for r, s in zip(able, states, strict=True)])
            wanted = [
                RoundRequest(r, s.round, len(s.tokens), self._depth(r))
                for r, s in zip(able, states, strict=True)
            ]
            entries = round_entries(wanted, self._draft_ids, self._target_id_of)
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """None for all: past an outcome there are no true features, and the layer does not continue from its own
        output."""
        return [None for _ in requests]

    def _depth(self, request: DraftRequest) -> int:
        return min(request.num_tokens, self.num_depths)

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        depth = self._depth(request)
        return depth > 0 and state.is_ready and len(state.tokens) + depth <= self.max_positions

    def _run(self, wanted: Sequence[tuple[PEagleSequence, int]]) -> None:
        """Run rows of new features and the missing mask rows, one pass over all sequences."""
        states, rows, left, selected = [], [], [], []
        total = 0
        for state, depth in wanted:
            num_true, first = state.num_waiting, state.slot.length
            if num_true > 0:
                state.slot.num_pending = 0  # mask rows are dropped
                state.round = OnePassRound()
                num_masks = depth - 1
                features = join_rows(state.pending)
                left.append([features[num_true:]] if num_true < features.shape[0] else [])
                states_in = torch.cat((features[:num_true], self._masked.expand(num_masks, -1)))
                tokens = [*state.tokens[first + 1 : first + 1 + num_true], *[self._mask_token] * num_masks]
                at = first
            else:
                num_masks = depth - len(state.round.depths)
                if num_masks <= 0:
                    continue
                left.append(state.pending)
                states_in = self._masked.expand(num_masks, -1)
                tokens = [self._mask_token] * num_masks
                state.slot.num_pending = len(state.round.depths) - 1
                at = first + state.slot.num_pending
            states.append(state)
            rows.append(Rows(state.slot, tokens, states_in, range(at, at + len(tokens))))
            total += len(tokens)
            # The last true row and all mask rows propose something.
            selected.append(range(total - num_masks - (num_true > 0), total))
        if not rows:
            return
        self._cache.reserve([(s.slot_id, part.num_rows) for s, part in zip(states, rows, strict=True)])
        output = self._layer.forward(rows, [row for part in selected for row in part])
        places = [0, *accumulate(len(part) for part in selected)]
        for index, state in enumerate(states):
            num_true = max(state.num_waiting, 0)
            state.pending = left[index]  # after the pass, which may fail for another sequence
            state.slot.length += num_true
            state.slot.num_pending -= num_true
            state.round.depths += [(output, place) for place in range(places[index], places[index + 1])]
