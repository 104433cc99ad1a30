"""Follows sequences and runs blocks of DFlash's layer, for DFlash and DSpark.

Row 0 of a block is the anchor, the last committed token, whose features the target does not have yet. Mask rows follow
it. Features of all positions before the anchor are the block's context. Their keys and values are kept from round to
round; the next round overwrites the block's own. The complete block is always run, because each row attends to all
others. So a token does not depend on how many tokens were requested, and a longer request runs nothing.

`fc` runs on the target's side (the tap's projection) and the context's norm here, so `hidden` numbers are sent for each
committed token. Each method chooses tokens from a block's output in its own way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.draft_layer import join_rows
from paceline.drafts import DraftEntry
from paceline.methods import backend
from paceline.methods.block_diffusion.layer import BlockPlan, BlockRows, DFlashLayer, read_layer
from paceline.methods.checkpoint import DrafterConfig, load_tensor
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.feature_follower import FeatureFollower, FollowedSequence
from paceline.methods.one_pass.round import OnePassRound, RoundRequest
from paceline.methods.target_vocabulary import read_vocabulary
from paceline.target import Device, TapSpec
from paceline.target.kv.slot import Slot


@dataclass(slots=True)
class BlockRound(OnePassRound):
    """Output of a block, and the chain made from it.

    Attributes:
        start: committed length that it continues; 0 before the first block.
        memory: `[1, rank]` of a recurrent head after the chain's last token; None before the first.
    """

    start: int = 0
    memory: Tensor | None = None

    def state(self, depth: int) -> Tensor:
        """Final-norm output of a row, `[1, hidden]`."""
        output, row = self.depths[depth]
        return output.states[row : row + 1]


@dataclass(slots=True)
class BlockSequence(FollowedSequence):
    """A sequence, and the block behind its committed tokens."""

    round: BlockRound = field(default_factory=BlockRound)


class BlockDrafter(FeatureFollower[BlockSequence]):
    """Follows sequences and runs blocks; see `paceline.methods.drafter.Drafter`.

    Args:
        layer: DFlash's.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        draft_vocab: draft ids.
        tap: what is read from the target.
        max_positions: longest text that is drafted for.
        device: where the layer runs.
    """

    def __init__(
        self,
        layer: DFlashLayer,
        draft_ids: Tensor | None,
        draft_vocab: int,
        tap: TapSpec,
        max_positions: int,
        device: Device,
    ) -> None:
        super().__init__(layer, tap, max_positions, device, layer.num_layers)
        self.longest_draft = layer.plan.num_drafts
        self._blocks = layer
        self._draft_ids = draft_ids
        self._target_id_of: list[int] | range = (
            range(draft_vocab) if draft_ids is None else draft_ids.tolist()
        )

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: its layers, fused by `fc` on the target's side."""
        return TapSpec(layers=config.tap_layers(), projection=load_tensor(directory, "fc.weight"))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens, all sequences in one pass."""
        with torch.inference_mode():
            able = [request for request in requests if self._can_draft(request)]
            self._run([self._get(request.sequence_id) for request in able])
            entries = self._choose([self._round_request(request) for request in able])
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """None for all: past an outcome there are no true features for a block's context."""
        for request in requests:
            self._get(request.sequence_id)
        return [None for _ in requests]

    @abstractmethod
    def _choose(self, wanted: Sequence[RoundRequest]) -> dict[int, DraftEntry]:
        """Entries by sequence, from the blocks that were run."""

    def _begin(self, tokens: list[int], slot: Slot, slot_id: int) -> BlockSequence:
        return BlockSequence(tokens, slot, slot_id)

    def _round_request(self, request: DraftRequest) -> RoundRequest:
        state = self._get(request.sequence_id)
        depth = min(request.num_tokens, self._blocks.plan.num_drafts)
        return RoundRequest(request, state.round, len(state.tokens), depth)

    def _can_draft(self, request: DraftRequest) -> bool:
        """Whether features have arrived and the whole block, which begins at the last token, fits the positions."""
        state = self._get(request.sequence_id)
        fits = len(state.tokens) - 1 + self._blocks.plan.size <= self.max_positions
        return request.num_tokens > 0 and state.is_ready and fits

    def _run(self, states: Sequence[BlockSequence]) -> None:
        """Run blocks of sequences that have new committed tokens, in one pass."""
        behind = [s for s in states if s.round.start != len(s.tokens)]
        if not behind:
            return
        rows, left = [], []
        for state in behind:
            count = len(state.tokens) - 1 - state.slot.length
            pending = join_rows(state.pending) if state.pending else self._no_features()
            left.append([pending[count:]] if count < pending.shape[0] else [])
            rows.append(BlockRows(state.slot, pending[:count], state.tokens[-1]))
        size = self._blocks.plan.size
        self._cache.reserve(
            [(s.slot_id, part.context.shape[0] + size) for s, part in zip(behind, rows, strict=True)]
        )
        output, count = self._blocks.forward(rows), self._blocks.plan.num_drafts
        for i, state in enumerate(behind):  # after the pass, which may fail
            state.pending = left[i]
            state.slot.length += rows[i].context.shape[0]
            places = range(i * count, (i + 1) * count)
            state.round = BlockRound([(output, row) for row in places], start=len(state.tokens))

    def _no_features(self) -> Tensor:
        return torch.empty(0, self._blocks.hidden, dtype=self._blocks.dtype, device=self._blocks.where)


def read_shared(
    config: DrafterConfig, tensors: dict[str, Tensor], target_dir: Path, draft_ids: Tensor | None,
    device: Device, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Embedding `[target_vocab, hidden]` and head `[draft_vocab, hidden]`: a checkpoint's own, else the target's.

    Raises:
        CheckpointError: the target's have other shapes.
    """
    embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    if embedding is None or head is None:
        theirs = read_vocabulary(target_dir, config.size("target_vocab"), config.size("hidden"), dtype)
        embedding = theirs[0] if embedding is None else embedding
        if head is None:
            head = theirs[1] if draft_ids is None else theirs[1][draft_ids.cpu()]
    return embedding.to(device.torch_device, dtype), head.to(device.torch_device, dtype)


def make_block_layer(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    head: Tensor,
    device: Device,
    dtype: torch.dtype,
) -> DFlashLayer:
    """The layer of a checkpoint, on the fastest backend, with this embedding and head."""
    layer, context = read_layer(config, tensors, embedding, head, dtype)
    num_layers = len(layer.blocks)
    return DFlashLayer(*backend.make_block_layer(layer, context, device), BlockPlan.read(config), num_layers)
