"""Drafters that continue from their own layer's output: how chains, trees and paths past outcomes grow.

They do so over any `DraftLayer`, whose rows `passes.py` runs. A method adds how a checkpoint becomes a layer, what the
layer reads of the target, and the rule by which its trees grow (`tree_rule.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from paceline.draft_layer import TreeGrower, TreeWanted, join_rows
from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.autoregressive.passes import LayerPasses
from paceline.methods.autoregressive.sequence import AutoregressiveSequence, DraftedChain, DraftedTree
from paceline.methods.checkpoint import DrafterConfig
from paceline.methods.choice import choose_chain_tokens, draw_chain_tokens
from paceline.methods.drafter import DraftRequest, OutcomeRequest, may_rank
from paceline.methods.sibling_chain import num_draws
from paceline.methods.tree import ROOT, GrowingTree
from paceline.sampling.params import VerifyMode
from paceline.target import Device, TapSpec


class AutoregressiveDrafter(LayerPasses):
    """Drafts with a layer that continues from its own output; see `paceline.methods.drafter.Drafter`."""

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """

    @classmethod
    @abstractmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Self:
        """Load a checkpoint; what it shares with the target is read from `target_dir`.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens, all sequences together."""
        with torch.inference_mode():
            able = [r for r in requests if self._can_draft(r)]
            chains = [r for r in able if r.max_nodes <= r.num_tokens or not r.may_rank]
            if isinstance(self._layer, TreeGrower) and not chains and self._ranks_by_draft(able):
                entries = self._grow_at_once(self._layer, able)
            else:
                self._run_stable_rows([self._sequences[r.sequence_id] for r in able])
                self._grow_chains(chains)
                entries = self._grow_trees([request for request in able if request not in chains])
            for request in chains:
                chain = self._sequences[request.sequence_id].chain
                assert chain is not None
                entries[request.sequence_id] = chain.entry()
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_continue: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past likely outcomes on the layer's own outputs, one pass over all sequences at a time."""
        with torch.inference_mode():
            growing = [
                (request, state, tree)
                for request in requests
                if (tree := self._tree_of(request, state := self._get(request.sequence_id))) is not None
            ]
            if may_continue():
                self._run_nodes([(r, s, t, t.nodes.sent_not_run()) for r, s, t in growing])
            ends = [t.nodes.outcomes(r.max_outcomes, r.partition, r.num_partitions) for r, _, t in growing]
            tips = list(ends)
            for step in range(max((request.num_tokens for request, _, _ in growing), default=0)):
                if not may_continue():
                    break
                going_on = [i for i, (request, _, _) in enumerate(growing) if step < request.num_tokens]
                self._run_nodes([(*growing[i], growing[i][2].nodes.not_run(tips[i])) for i in going_on])
                for i in going_on:
                    tips[i] = [growing[i][2].nodes.best_child(node) for node in tips[i]]
            entries = {
                request.sequence_id: tree.nodes.entry(tree.start, tree.nodes.behind(own, request.max_nodes))
                for (request, _, tree), own in zip(growing, ends, strict=True)
            }
        return [entries.get(request.sequence_id) for request in requests]

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        return (
            request.num_tokens > 0
            and state.is_ready
            and len(state.tokens) + request.num_tokens <= self.max_positions
        )

    def _ranks_by_draft(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether trees grow only by the drafter's own probabilities, not by a static shape or the target's noise."""
        return all(
            self._rule.width(request.num_tokens, request.max_nodes) is not None
            and request.sampling.resolved_mode is not VerifyMode.COUPLED
            for request in requests
        )

    def _grow_at_once(self, layer: TreeGrower, requests: Sequence[DraftRequest]) -> dict[int, DraftEntry]:
        """Run stable rows and grow trees behind them in one call of the layer, and send what the rule keeps."""
        if not requests:
            return {}
        states = [self._sequences[request.sequence_id] for request in requests]
        stable = self._take_stable_rows(states)
        place_of = {id(state): place for place, state in enumerate(stable.states)}
        wanted, num_rows = [], []
        for request, state in zip(requests, states, strict=True):
            self._drop_drafted(state)
            state.chain = state.tree = None  # before the pass: if it fails, their rows are gone
            size = request.num_tokens, request.max_nodes
            width, branch = self._rule.width(*size), min(self._rule.branch(*size), self._vocab)
            root = place_of.get(id(state), state.stable)
            assert width is not None
            assert root is not None
            wanted.append(TreeWanted(state.slot, len(state.tokens), request.num_tokens, width, branch, root))
            first = stable.rows[root].num_rows if isinstance(root, int) else 0
            num_rows.append(first + (request.num_tokens - 1) * width)
        self._reserve(states, num_rows)
        output, grown = layer.grow(stable.rows, stable.last, wanted, self._draft_ids)
        if output is not None:
            self._settle(stable, output)
        entries = {}
        for request, state, tree, own in zip(requests, states, wanted, grown, strict=True):
            nodes = GrowingTree.grown(own.tokens, own.log_probs, own.row_nodes, tree.branch)
            branch_ahead = self._rule.branch_ahead(request.num_tokens, request.max_nodes)
            state.tree = DraftedTree(tree.start, nodes, min(branch_ahead, self._vocab), own.states)
            sent = self._rule.send(nodes, request.num_tokens, request.max_nodes)
            entries[request.sequence_id] = nodes.entry(tree.start, sent)
        return entries

    def _grow_chains(self, requests: Sequence[DraftRequest]) -> None:
        """Extend each request's chain to its length, one token of all sequences at a time."""
        growing = []
        for request in requests:
            state = self._sequences[request.sequence_id]
            if state.chain is None or state.chain.start != len(state.tokens):
                assert state.stable is not None
                self._drop_drafted(state)
                state.tree = None
                state.chain = DraftedChain(len(state.tokens), state.stable.state, state.stable.logits)
            if len(state.chain.tokens) < request.num_tokens:
                growing.append((request, state))
        if not growing:
            return
        self._reserve([s for _, s in growing], [r.num_tokens for r, _ in growing])
        while growing:
            chains = [state.chain for _, state in growing if state.chain is not None]
            self._run_drafted([(s, c) for (_, s), c in zip(growing, chains, strict=True) if c.tokens])
            logits = join_rows([chain.logits for chain in chains])  # [sequences, draft_vocab]
            drawn = [i for i, (request, _) in enumerate(growing) if request.draw_rule is not DrawRule.TOP]
            ranked = [i for i in range(len(growing)) if i not in drawn] if drawn else range(len(growing))
            if ranked:
                positions = [chains[i].start + len(chains[i].tokens) for i in ranked]
                params = [growing[i][0].sampling for i in ranked]
                rows = logits[ranked] if drawn else logits
                chosen, log_probs = choose_chain_tokens(rows, self._draft_ids, positions, params)
                for i, token, log_prob in zip(ranked, chosen.tolist(), log_probs.tolist(), strict=True):
                    chains[i].tokens.append(token)
                    chains[i].log_probs.append(log_prob)
            if drawn:
                self._draw(logits[drawn], [(growing[i][0], chains[i]) for i in drawn])
            growing = [
                part
                for part, chain in zip(growing, chains, strict=True)
                if len(chain.tokens) < part[0].num_tokens
            ]

    def _draw(self, logits: Tensor, growing: Sequence[tuple[DraftRequest, DraftedChain]]) -> None:
        """Draw the next position of chains in modes that verify draws: `logits` `[chains, draft_vocab]`."""
        draws = draw_chain_tokens(
            logits,
            self._draft_ids,
            starts=[chain.start for _, chain in growing],
            positions=[chain.start + len(chain.tokens) for _, chain in growing],
            params=[request.sampling for request, _ in growing],
            rules=[request.draw_rule for request, _ in growing],
            support_sizes=[request.support_size for request, _ in growing],
            counts=[num_draws(len(chain.tokens), r.num_tokens, r.max_nodes) for r, chain in growing],
        )
        for (_, chain), siblings in zip(growing, draws, strict=True):
            chain.tokens.append(siblings.tokens[0])
            chain.draws.append(siblings)

    def _grow_trees(self, requests: Sequence[DraftRequest]) -> dict[int, DraftEntry]:
        """Grow trees by the method's rule, one depth of all sequences at a time, and send what the rule keeps."""
        growing: list[tuple[DraftRequest, AutoregressiveSequence, DraftedTree]] = []
        proposed: list[list[int]] = []
        for request in requests:
            state = self._sequences[request.sequence_id]
            assert state.stable is not None
            self._drop_drafted(state)
            state.chain = None
            start = len(state.tokens)
            branch = min(self._rule.branch(request.num_tokens, request.max_nodes), self._vocab)
            state.tree = tree = DraftedTree(start, GrowingTree(), branch, state.stable.state[:0])
            best = self._best(state.stable, [start], [request.sampling], branch)
            proposed.append(self._propose(tree, [ROOT], *best))
            growing.append((request, state, tree))
        for step in range(1, max((request.num_tokens for request in requests), default=0)):
            wanted = [
                (r, s, t, self._rule.expand(t.nodes, own, r.num_tokens, r.max_nodes))
                for (r, s, t), own in zip(growing, proposed, strict=True)
                if step < r.num_tokens
            ]
            found = iter(self._run_nodes(wanted))
            proposed = [next(found) if step < request.num_tokens else [] for request, _, _ in growing]
        for request, _, tree in growing:
            tree.branch = min(self._rule.branch_ahead(request.num_tokens, request.max_nodes), self._vocab)
        return {
            request.sequence_id: tree.nodes.entry(
                tree.start, self._rule.send(tree.nodes, request.num_tokens, request.max_nodes)
            )
            for request, _, tree in growing
        }

    def _tree_of(self, request: OutcomeRequest, state: AutoregressiveSequence) -> DraftedTree | None:
        """The tree of the last draft, if it still continues the committed tokens."""
        tree = state.tree
        if tree is None or tree.start != len(state.tokens):
            return None
        if request.num_tokens < 1 or not may_rank(request.sampling):
            return None
        last = tree.start + tree.nodes.depth + request.num_tokens
        return tree if last <= self.max_positions else None
