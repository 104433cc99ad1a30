"""The independent drafter: a complete small language model with its own cache, drafting token by token.

Speculative sampling in its first form (Leviathan et al., 2211.17192; Chen et al., 2302.01318). It reads tokens alone
and runs through the target engine, so that whatever model the engine runs can draft. In its checkpoint directory
`config.json` names the drafter and `model/` holds the small model; or the directory is the model itself. Where its
vocabulary is not the target's, `vocabulary.py` says which tokens it may propose and what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens, rank_children
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.sibling_chain import num_draws, sibling_chain_entry
from paceline.methods.tree import ROOT, GrowingTree
from paceline.methods.whole_model.draft_model import DraftModel, load_engine, model_directory
from paceline.methods.whole_model.draft_text import DraftText
from paceline.methods.whole_model.text_follower import FollowedText, TextFollower
from paceline.methods.whole_model.vocabulary import DraftVocabulary
from paceline.sampling import SamplingParams
from paceline.target import Device, SequenceRows, common_prefix
from paceline.trie import DraftEntry, DrawRule, SiblingDraws

BRANCH = 4
"""Children that every row of a tree proposes."""


@dataclass(slots=True)
class IndependentSequence(FollowedText):
    """A sequence's committed tokens, and the chain drafted behind them.

    Attributes:
        own: the same text in the ids of the drafter's model.
        num_cached: leading ids of `text` whose keys and values are in the slot.
        chain: drafted, the target's ids.
        own_chain: the same tokens in the drafter's ids.
        draws: of each token of the chain, where tokens are drawn; log_probs then stays empty.
    """

    own: DraftText
    num_cached: int = 0
    chain: list[int] = field(default_factory=list)
    own_chain: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def entry(self) -> DraftEntry:
        """The chain as a draft entry; where tokens were drawn, with their siblings."""
        if self.draws:
            return sibling_chain_entry(len(self.tokens), self.draws)
        return DraftEntry.chain(len(self.tokens), tuple(self.chain), tuple(self.log_probs))

    @property
    def text(self) -> list[int]:
        """What the drafter's model reads: the committed text and the chain."""
        return self.own.ids + self.own_chain

    @property
    def next_position(self) -> int:
        """The target's position of the token that the chain goes on with."""
        return len(self.tokens) + len(self.chain)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens; what the chain foretold keeps its place in the cache.

        With another tokenizer a token may also change how the text before it is read: what is cached is then good up to
        the first id that is another one.
        """
        agreed = common_prefix(tokens, self.chain)
        known = len(self.own.ids)
        self.tokens.extend(tokens)
        kept = self.own.extend(tokens)
        foretold = 0
        if kept == known:
            foretold = common_prefix(self.own.ids[known:], self.own_chain)
        if agreed == len(tokens) and kept == known and len(self.own.ids) == known + foretold:
            self.chain, self.own_chain = self.chain[agreed:], self.own_chain[foretold:]
            self.log_probs, self.draws = self.log_probs[agreed:], self.draws[agreed:]
            return
        self.chain, self.own_chain, self.log_probs, self.draws = [], [], [], []
        # The first id that differs, and all behind it, leave the cache.
        self.num_cached = min(self.num_cached, kept + foretold)


class OutcomeTree:
    """A chain, and what may follow where the target leaves it.

    Attributes:
        nodes: what was proposed.
        tokens: of the rows to run: the chain's, then those of the paths behind it.
        parents: of each row, -1 for the root.
    """

    def __init__(self, chain: Sequence[int]) -> None:
        self.nodes = GrowingTree()
        self.tokens = list(chain)
        self.parents = list(range(-1, len(chain) - 1))
        self._rows: list[int] = []  # node of each row, as far as they have been run
        self._chain = len(chain)
        self._fresh: list[int] = []

    def run(self, nodes: Sequence[int]) -> None:
        """Add rows for proposed nodes."""
        tokens, from_rows, _, _ = self.nodes.run(nodes)
        self.tokens += tokens
        self.parents += from_rows
        self._fresh = list(nodes)

    def propose(
        self, logits: torch.Tensor, draft_ids: torch.Tensor | None, length: int, sampling: SamplingParams
    ) -> None:
        """Take in `[1 + rows, draft_vocab]` float32 logits, the root's first, of a text of `length` committed tokens.

        `draft_ids` are the target's ids of their columns, as in `choose_chain_tokens`.
        """
        if self._rows:
            rows = logits[1 + len(self._rows) :]
            depths = self.nodes.depths(self._fresh)
        else:
            rows, depths = logits, list(range(self._chain + 1))
        if len(rows) == 0:
            return
        positions = [length + depth for depth in depths]
        log_probs, ids = rank_children(rows, draft_ids, positions, [sampling] * len(positions), BRANCH)
        if draft_ids is not None:
            ids = [draft_ids[row].tolist() for row in ids]
        if self._rows:
            self.nodes.propose(self._fresh, log_probs, ids)
            self._rows += self._fresh
            self._fresh = []
            return
        parent = ROOT
        for place, (own_log_probs, own_ids) in enumerate(zip(log_probs, ids, strict=True)):
            if (
                place < self._chain and self.tokens[place] not in own_ids
            ):  # chosen otherwise: it is kept, as the last
                own_log_probs[-1], own_ids[-1] = own_log_probs[-1], self.tokens[place]
            self.nodes.propose([parent], [own_log_probs], [own_ids])
            if place < self._chain:
                parent = self.nodes.send_child(parent, self.tokens[place])
                self.nodes.run([parent])
                self._rows.append(parent)


class IndependentDrafter(TextFollower[IndependentSequence]):
    """Drafts with a model of its own; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str] = "independent"

    def __init__(self, model: DraftModel, vocabulary: DraftVocabulary) -> None:
        super().__init__(model)
        self._open_text = vocabulary.open_text
        ids = vocabulary.target_ids
        self._draft_ids = None if ids is None else ids.to(self._engine.device.torch_device)
        self._own_of = vocabulary.own_of()

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> None:
        """It reads no features."""
        return

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> IndependentDrafter:
        """Load a checkpoint.

        Its vocabulary is the target's, a part of it, or another tokenizer's; see `DraftVocabulary.read`. Where not all
        of it can be drafted, `shape.prune_head` says whether the head is cut to what can.
        """
        model_dir = model_directory(directory)
        engine = load_engine(directory, device, dtype)
        vocabulary = DraftVocabulary.read(directory, model_dir, config, target_dir, engine.shape.vocab_size)
        prune = config.shape.get("prune_head")
        if prune is not None and not isinstance(prune, bool):
            raise CheckpointError(f"shape.prune_head must be true or false, not {prune!r}")
        return cls(DraftModel.load(model_dir, engine, vocabulary.own_ids, prune), vocabulary)

    def _begin(self, slot: int) -> IndependentSequence:
        return IndependentSequence(slot, [], self._open_text())

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, one token of all sequences at a time; none where the text ends within a character."""
        able = [r for r in requests if self._can_draft(r)]
        growing = [r for r in able if len(self._get(r.sequence_id).chain) < r.num_tokens]
        while growing:
            self._grow(growing)
            growing = [r for r in growing if len(self._get(r.sequence_id).chain) < r.num_tokens]
        drafted = {r.sequence_id: self._get(r.sequence_id).entry() for r in able}
        return [drafted.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_go_on: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past likely outcomes: every pass runs the whole tree, which for a small model is few rows."""
        growing: list[tuple[OutcomeRequest, IndependentSequence, OutcomeTree]] = []
        for request in requests:
            state = self._get(request.sequence_id)
            fits = len(state.text) + request.num_tokens < self.max_positions
            if request.num_tokens > 0 and state.chain and not state.draws and fits:
                growing.append((request, state, OutcomeTree(state.chain)))
        if not growing or not may_go_on():
            return [None for _ in requests]
        self._run_trees(growing)
        ends = [
            tree.nodes.outcomes(request.max_outcomes, request.partition, request.num_partitions)
            for request, _, tree in growing
        ]
        tips = list(ends)
        for step in range(max(request.num_tokens for request, _, _ in growing)):
            if not may_go_on():
                break
            going_on = [i for i, (request, _, _) in enumerate(growing) if step < request.num_tokens]
            for i in going_on:
                growing[i][2].run(tips[i])
            self._run_trees([growing[i] for i in going_on])
            for i in going_on:
                tips[i] = [growing[i][2].nodes.best_child(node) for node in tips[i]]
        entries = {
            request.sequence_id: tree.nodes.entry(
                len(state.tokens), tree.nodes.behind(own, request.max_nodes)
            )
            for (request, state, tree), own in zip(growing, ends, strict=True)
        }
        return [entries.get(request.sequence_id) for request in requests]

    def _run_trees(self, growing: Sequence[tuple[OutcomeRequest, IndependentSequence, OutcomeTree]]) -> None:
        """One step over all trees, root included; proposes what follows the rows that are new."""
        rows = []
        for _, state, tree in growing:
            committed = state.own.ids
            root = len(committed) - 1
            self._engine.truncate(state.slot, min(root, state.num_cached, self._engine.length(state.slot)))
            behind = committed[self._engine.length(state.slot) :]
            first = len(behind)
            parents = [
                *range(-1, first - 1),
                *(first - 1 if row < 0 else first + row for row in tree.parents),
            ]
            wanted = [first - 1, *range(first, first + len(tree.tokens))]
            tokens = [*behind, *(self._own_id(token) for token in tree.tokens)]
            rows.append(SequenceRows(state.slot, tokens, parents=parents, num_logits=wanted))
            state.num_cached = len(committed)
        outputs = self._model.step(rows)
        for (request, state, tree), part, logits in zip(growing, rows, outputs, strict=True):
            self._engine.keep(state.slot, range(len(part.tokens) - len(tree.tokens)))
            tree.propose(logits, self._draft_ids, len(state.tokens), request.sampling)

    def _grow(self, growing: Sequence[DraftRequest]) -> None:
        states = [self._get(request.sequence_id) for request in growing]
        rows = []
        for state in states:
            text = state.text
            # The last id is run again where the target's tokens since have added none.
            first = min(state.num_cached, self._engine.length(state.slot), len(text) - 1)
            self._engine.truncate(state.slot, first)
            rows.append(SequenceRows(state.slot, text[first:], num_logits="last"))
        logits = torch.cat(self._model.step(rows))
        for state in states:
            state.num_cached = len(state.text)
        drawn = [i for i, request in enumerate(growing) if request.draw_rule is not DrawRule.TOP]
        ranked = [i for i in range(len(growing)) if i not in drawn] if drawn else range(len(growing))
        if ranked:
            positions = [states[i].next_position for i in ranked]
            params = [growing[i].sampling for i in ranked]
            chosen, log_probs = choose_chain_tokens(
                logits[ranked] if drawn else logits, self._draft_ids, positions, params
            )
            for i, token, log_prob in zip(ranked, chosen.tolist(), log_probs.tolist(), strict=True):
                states[i].chain.append(token)
                states[i].own_chain.append(self._own_id(token))
                states[i].log_probs.append(log_prob)
        if drawn:
            self._draw(logits[drawn], [(growing[i], states[i]) for i in drawn])

    def _draw(
        self, logits: torch.Tensor, growing: Sequence[tuple[DraftRequest, IndependentSequence]]
    ) -> None:
        """Draw the next position of chains in modes that verify draws: `logits` `[chains, vocab]`."""
        draws = draw_chain_tokens(
            logits,
            self._draft_ids,
            starts=[len(state.tokens) for _, state in growing],
            positions=[state.next_position for _, state in growing],
            params=[request.sampling for request, _ in growing],
            rules=[request.draw_rule for request, _ in growing],
            support_sizes=[request.support_size for request, _ in growing],
            counts=[num_draws(len(state.chain), r.num_tokens, r.max_nodes) for r, state in growing],
        )
        for (_, state), siblings in zip(growing, draws, strict=True):
            state.chain.append(siblings.tokens[0])
            state.own_chain.append(self._own_id(siblings.tokens[0]))
            state.draws.append(siblings)

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        return (
            request.num_tokens > 0
            and state.own.is_whole
            and len(state.own.ids) + request.num_tokens <= self.max_positions
        )

    def _own_id(self, token: int) -> int:
        """The model's id of a drafted token."""
        return token if self._own_of is None else self._own_of[token]
