"""PARD (2504.18583): a small causal language model that drafts all tokens in one pass, by mask tokens.

A pass runs the tokens committed since the last pass, and then `K - 1` copies of one *mask token*. The last true row
proposes the next token, mask row `i` the token `i` places further. Attention is causal and positions are consecutive,
so the target engine runs the model like any other. Keys and values of true rows are kept. Those of mask rows are
dropped once tokens are committed; accepted tokens are then run as true rows. All mask rows are alike, so a drafter can
draft more tokens than it was trained for, and a longer request runs only the new rows.

It reads only the target's tokens: one checkpoint serves all targets of one tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from paceline.draft_layer.torch_layer import TorchOutput
from paceline.drafts import DraftEntry
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.one_pass.round import OnePassRound, RoundRequest, round_entries
from paceline.methods.pard.checkpoint import mask_token, read_vocabulary
from paceline.methods.whole_model.draft_model import DraftModel, load_engine, model_directory
from paceline.methods.whole_model.text_follower import FollowedText, TextFollower
from paceline.target import Device, SequenceRows


@dataclass(slots=True)
class PardSequence(FollowedText):
    """A sequence's committed tokens, and the round behind them.

    Attributes:
        num_cached: committed tokens whose keys and values are in the slot; mask rows may follow all of them.
        round: the rows behind the committed tokens, once all of these are cached.
        with_features: whether the cached rows were run with the target's features (PARD-2).
    """

    num_cached: int = 0
    round: OnePassRound = field(default_factory=OnePassRound)
    with_features: bool = False

    def forget(self) -> None:
        """Forget the cached rows: the next pass runs the whole text."""
        self.num_cached, self.round = 0, OnePassRound()


class PardDrafter(TextFollower[PardSequence]):
    """Drafts with mask tokens; see `paceline.methods.drafter.Drafter`.

    Args:
        model: runs rows; its logits are those of the tokens that may be drafted.
        draft_ids: `[draft_vocab]` int64 target id of each logit; None where they are the same.
        mask: the mask token's id, which is never proposed.
    """

    def __init__(self, model: DraftModel, draft_ids: Tensor | None, mask: int) -> None:
        super().__init__(model)
        self._mask = mask
        self._target_id_of: Sequence[int] = (
            range(self._engine.shape.vocab_size) if draft_ids is None else draft_ids.tolist()
        )
        self._mask_column = self._target_id_of.index(mask) if mask in self._target_id_of else None
        self._draft_ids = None if draft_ids is None else draft_ids.to(self._engine.device.torch_device)

    def _begin(self, slot: int) -> PardSequence:
        return PardSequence(slot, [])

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens in a row, all sequences in one pass."""
        able = [r for r in requests if self._can_draft(r)]
        states = [self._get(r.sequence_id) for r in able]
        for request, state in zip(able, states, strict=True):
            wanted = self._uses_features(request)
            if state.with_features != wanted:
                state.forget()
                state.with_features = wanted
        with torch.inference_mode():
            self._run([(s, r.num_tokens) for r, s in zip(able, states, strict=True)])
            entries = round_entries(
                [
                    RoundRequest(r, s.round, len(s.tokens), r.num_tokens)
                    for r, s in zip(able, states, strict=True)
                ],
                self._draft_ids,
                self._target_id_of,
            )
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """None for all: what a mask row proposes does not depend on the tokens before it."""
        return [None for _ in requests]

    def _run(self, wanted: Sequence[tuple[PardSequence, int]]) -> None:
        """Run new committed tokens and the missing mask rows, one pass over all sequences."""
        states: list[PardSequence] = []
        rows: list[SequenceRows] = []
        vocab = self._engine.shape.vocab_size
        for state, depth in wanted:
            fresh = state.tokens[state.num_cached :]
            if fresh:
                state.round = OnePassRound()
                num_masks, num_kept = depth - 1, state.num_cached
            else:
                num_masks = depth - len(state.round.depths)
                num_kept = state.num_cached + len(state.round.depths) - 1
            if not fresh and num_masks <= 0:
                continue
            # Drop mask rows of earlier drafts, and rows that a failed pass left.
            self._engine.truncate(state.slot, min(num_kept, self._engine.length(state.slot)))
            # A target may have ids past the model's own, which only pad its head; they are read as unknown tokens.
            tokens = [token if token < vocab else self._mask for token in fresh]
            tokens += [self._mask] * num_masks
            first = max(0, len(fresh) - 1)
            states.append(state)
            rows.append(
                SequenceRows(
                    state.slot,
                    tokens,
                    num_logits=range(first, len(tokens)),
                    added=self._added(state, len(fresh), num_masks),
                )
            )
        if not rows:
            return
        for state, logits in zip(states, self._model.step(rows), strict=True):
            if self._mask_column is not None:
                logits[:, self._mask_column] = -torch.inf
            output = TorchOutput(logits[:0], logits)
            state.num_cached = len(state.tokens)
            state.round.depths += [(output, row) for row in range(logits.shape[0])]

    def _uses_features(self, request: DraftRequest) -> bool:
        """Whether a draft is made with the target's features."""
        return False

    def _added(self, state: PardSequence, num_true: int, num_masks: int) -> Tensor | None:
        """Vectors to add to the embeddings of the last `num_true` committed tokens and of the mask rows after them."""
        return None

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        depth = request.num_tokens
        return depth > 0 and bool(state.tokens) and len(state.tokens) + depth <= self.max_positions


def load_model(
    directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
) -> tuple[DraftModel, Tensor | None, int]:
    """The model of a checkpoint, the target's ids of its logits, and its mask token.

    Raises:
        CheckpointError: the model cannot be run, or its tokenizer is not the target's.
    """
    engine = load_engine(directory, device, dtype)
    vocab = engine.shape.vocab_size
    mask = mask_token(config, vocab)
    vocabulary = read_vocabulary(directory, config, target_dir, vocab)
    model = DraftModel.load(model_directory(directory), engine, vocabulary.own_ids, None)
    return model, vocabulary.target_ids, mask
