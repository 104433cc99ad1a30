"""The independent drafter: a complete small language model with its own cache, drafting token by token.

Speculative sampling in its first form (Leviathan et al., 2211.17192; Chen et al., 2302.01318). It reads only tokens,
and the target engine runs it, so any model that the engine supports can draft. In its checkpoint directory
`config.json` names the drafter and `model/` has the small model; or the directory is the model itself. If its
vocabulary is not the target's, `vocabulary.py` says which tokens it may propose and what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.checkpoint import CheckpointError, DrafterConfig
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.independent.outcome_tree import OutcomeTree
from paceline.methods.independent.sequence import IndependentSequence
from paceline.methods.sibling_chain import num_draws
from paceline.methods.whole_model.draft_model import DraftModel, load_engine, model_directory
from paceline.methods.whole_model.text_follower import TextFollower
from paceline.methods.whole_model.vocabulary import DraftVocabulary
from paceline.target import Device, SequenceRows


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
        """None: it reads no features."""
        return

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> IndependentDrafter:
        """Load a checkpoint.

        Its vocabulary is the target's, a part of it, or another tokenizer's; see `DraftVocabulary.read`. If only a
        part of it can be drafted, `shape.prune_head` says whether the head is cut to that part.
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
        """Draft chains, one token of all sequences at a time; None if the text ends within a character."""
        able = [r for r in requests if self._can_draft(r)]
        growing = [r for r in able if len(self._get(r.sequence_id).chain) < r.num_tokens]
        while growing:
            self._grow(growing)
            growing = [r for r in growing if len(self._get(r.sequence_id).chain) < r.num_tokens]
        drafted = {r.sequence_id: self._get(r.sequence_id).entry() for r in able}
        return [drafted.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past likely outcomes: every pass runs the whole tree, which is few rows for a small model."""
        growing: list[tuple[OutcomeRequest, IndependentSequence, OutcomeTree]] = []
        for request in requests:
            state = self._get(request.sequence_id)
            fits = len(state.text) + request.num_tokens < self.max_positions
            if request.num_tokens > 0 and state.chain and not state.draws and fits:
                growing.append((request, state, OutcomeTree(state.chain)))
        if not growing or not may_continue():
            return [None for _ in requests]
        self._run_trees(growing)
        ends = [
            tree.nodes.outcomes(request.max_outcomes, request.partition, request.num_partitions)
            for request, _, tree in growing
        ]
        tips = list(ends)
        for step in range(max(request.num_tokens for request, _, _ in growing)):
            if not may_continue():
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
        """Run all trees in one step, root included, and propose children of the new rows."""
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
            # The last id is run again if the target's new tokens added no id.
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
