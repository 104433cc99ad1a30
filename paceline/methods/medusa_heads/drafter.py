"""Drafts with Medusa's heads on the target's last hidden state: each head one token further on than the last.

With `n` tokens committed the heads read the final hidden state of position `n - 2`, the newest that exists: the LM head
predicted the root from it, position `n - 1`, and head `k` proposes position `n + k`. Heads do not read one another's
tokens, so one pass gives all that the heads can say until the target's next step. A chain takes the likeliest token of
each head. A tree combines their likeliest tokens in a fixed shape (`static_tree.py`), from accuracies that were
measured when the heads were trained. There is no cache and no prompt; a round reads one row of features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens, rank_children
from paceline.methods.drafter import (
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    UnknownDraftSequenceError,
)
from paceline.methods.medusa_heads.heads import (
    MedusaHeads,
    MedusaShape,
    OutputHead,
)
from paceline.methods.medusa_heads.sequence import MedusaSequence
from paceline.methods.medusa_heads.target_side import TAP, read_accuracies, read_target_head
from paceline.methods.sibling_chain import num_draws, sibling_chain_entry
from paceline.methods.static_tree import StaticTree, search_tree
from paceline.sampling.params import SamplingParams
from paceline.target import Device, TapSpec


class HeadsDrafter:
    """Drafts with Medusa heads; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str]

    def __init__(
        self,
        heads: MedusaHeads,
        draft_ids: Tensor | None,
        accuracies: Sequence[Sequence[float]],
        max_positions: int,
    ) -> None:
        self._heads = heads
        self._draft_ids = (
            draft_ids  # [draft_vocab] int64: target id of each draft id; None where they are the same
        )
        self._accuracies = accuracies
        self._trees: dict[tuple[int, int], StaticTree] = {}
        self._sequences: dict[int, MedusaSequence] = {}
        self.tap: TapSpec | None = TAP
        self.max_positions = max_positions
        self.longest_draft: int | None = heads.shape.num_heads

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap, which is the same for every checkpoint."""
        return TAP

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; output heads that are the target's come from its directory.

        Raises:
            CheckpointError: sizes, tensors or accuracies do not fit one another or the target.
        """
        shape = MedusaShape.from_config(config)
        with torch.inference_mode():
            tensors = load_tensors(directory, shape.tensor_shapes())
            draft_ids = shape.draft_ids(tensors["token_map"]) if shape.is_reduced else None
            target_head = None
            if shape.output is OutputHead.TARGET:
                target_head = read_target_head(target_dir, shape, dtype)
                target_head = target_head if draft_ids is None else target_head[draft_ids]
            heads = MedusaHeads(shape, tensors, target_head, device, dtype)
            ids = None if draft_ids is None else draft_ids.to(device.torch_device)
        return cls(heads, ids, read_accuracies(config, shape), config.size("max_positions"))

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self._sequences[sequence_id] = MedusaSequence(list(tokens))

    def close(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(sequence_id, None)

    def extend(self, sequence_id: int, start: int, tokens: Sequence[int]) -> None:
        """Take in committed tokens."""
        state = self._get(sequence_id)
        known = len(state.tokens)
        if start > known:
            raise DrafterError(f"sequence {sequence_id}: tokens {known} to {start - 1} are missing")
        state.tokens.extend(tokens[known - start :])

    def feed(self, sequence_id: int, start: int, features: Tensor) -> None:
        """Take in features; only the newest position is kept."""
        state = self._get(sequence_id)
        hidden = self._heads.shape.hidden
        if features.ndim != 2 or features.shape[1] != hidden:
            raise DrafterError(f"features must be [n, {hidden}], not {list(features.shape)}")
        newest = start + int(features.shape[0]) - 1
        if newest > state.position:
            # A copy: a view would keep all rows of its step in memory.
            state.features = features[-1:].to(device=self._heads.where, dtype=self._heads.dtype, copy=True)
            state.position = newest

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens, all sequences in one pass."""
        with torch.inference_mode():
            able = [request for request in requests if self._can_draft(request)]
            self._run_heads([(self._sequences[r.sequence_id], self._num_tokens(r)) for r in able])
            entries: dict[int, DraftEntry] = {}
            chains = []
            for request in able:
                state = self._sequences[request.sequence_id]
                if request.draw_rule is not DrawRule.TOP:
                    entries[request.sequence_id] = self._draw(state, request)
                elif request.max_nodes > self._num_tokens(request) and request.may_rank:
                    entries[request.sequence_id] = self._combine(state, request)
                else:
                    chains.append(request)
            entries |= self._chains(chains)
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """None for all: heads read no drafted token, so they have nothing to say past an outcome."""
        for request in requests:
            self._get(request.sequence_id)
        return [None for _ in requests]

    def _get(self, sequence_id: int) -> MedusaSequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None

    def _num_tokens(self, request: DraftRequest) -> int:
        """Length of a path: at most the number of heads."""
        return min(request.num_tokens, self._heads.shape.num_heads)

    def _can_draft(self, request: DraftRequest) -> bool:
        state, num_tokens = self._get(request.sequence_id), self._num_tokens(request)
        return num_tokens > 0 and state.is_ready and len(state.tokens) + num_tokens <= self.max_positions

    def _run_heads(self, wanted: Sequence[tuple[MedusaSequence, int]]) -> None:
        """Run the heads that each draft needs and that have not been run, all sequences in one pass."""
        for state, _ in wanted:
            if state.logits_length != len(state.tokens):
                state.logits, state.logits_length, state.draws = None, len(state.tokens), []
        behind = [(state, count) for state, count in wanted if state.num_run < count]
        if not behind:
            return
        heads = range(min(state.num_run for state, _ in behind), max(count for _, count in behind))
        rows = torch.cat([state.features for state, _ in behind if state.features is not None])
        for (state, _), logits in zip(behind, self._heads.forward(rows, heads), strict=True):
            fresh = logits[state.num_run - heads.start :]
            state.logits = fresh if state.logits is None else torch.cat((state.logits, fresh))

    def _chains(self, requests: Sequence[DraftRequest]) -> dict[int, DraftEntry]:
        """Chains of the token of each head that the target is likeliest to choose."""
        if not requests:
            return {}
        rows: list[Tensor] = []
        positions: list[int] = []
        params: list[SamplingParams] = []
        sizes: list[int] = []
        for request in requests:
            state, count = self._sequences[request.sequence_id], self._num_tokens(request)
            assert state.logits is not None
            rows.append(state.logits[:count])
            positions += range(len(state.tokens), len(state.tokens) + count)
            params += [request.sampling] * count
            sizes.append(count)
        chosen, log_probs = choose_chain_tokens(torch.cat(rows), self._draft_ids, positions, params)
        entries = {}
        for request, own, own_log_probs in zip(
            requests, chosen.split(sizes), log_probs.split(sizes), strict=True
        ):
            start = len(self._sequences[request.sequence_id].tokens)
            entries[request.sequence_id] = DraftEntry.chain(start, own.tolist(), own_log_probs.tolist())
        return entries

    def _combine(self, state: MedusaSequence, request: DraftRequest) -> DraftEntry:
        """The likeliest tokens of the heads in the shape of the static tree."""
        assert state.logits is not None
        start, depth = len(state.tokens), self._num_tokens(request)
        tree = self._tree(request.max_nodes, depth)
        count = max(tree.ranks) + 1
        positions = list(range(start, start + depth))
        log_probs, ids = rank_children(
            state.logits[:depth], self._draft_ids, positions, [request.sampling] * depth, count
        )
        places: dict[int, int] = {-1: -1}  # by node of the tree that has a token
        tokens: list[int] = []
        parents: list[int] = []
        node_log_probs: list[float] = []
        for node, (parent, head, rank) in enumerate(zip(tree.parents, tree.heads, tree.ranks, strict=True)):
            # Filters may leave a head fewer tokens than the tree has ranks.
            if parent in places and rank < len(ids[head]):
                places[node] = len(tokens)
                tokens.append(ids[head][rank])
                parents.append(places[parent])
                node_log_probs.append(min(0.0, log_probs[head][rank]))
        if self._draft_ids is not None:
            tokens = self._draft_ids[torch.tensor(tokens, device=self._draft_ids.device)].tolist()
        return DraftEntry(start, tuple(tokens), tuple(parents), tuple(node_log_probs))

    def _tree(self, max_nodes: int, depth: int) -> StaticTree:
        key = (max_nodes, depth)
        if key not in self._trees:
            self._trees[key] = search_tree(self._accuracies, max_nodes, depth)
        return self._trees[key]

    def _draw(self, state: MedusaSequence, request: DraftRequest) -> DraftEntry:
        """Draw from each head's own distribution: given the features, it holds for its position on every path."""
        assert state.logits is not None
        start, count = len(state.tokens), self._num_tokens(request)
        places = range(len(state.draws), count)
        if places:
            state.draws += draw_chain_tokens(
                state.logits[places.start : count],
                self._draft_ids,
                starts=[start] * len(places),
                positions=[start + place for place in places],
                params=[request.sampling] * len(places),
                rules=[request.draw_rule] * len(places),
                support_sizes=[request.support_size] * len(places),
                counts=[num_draws(place, count, request.max_nodes) for place in places],
            )
        return sibling_chain_entry(start, state.draws)
