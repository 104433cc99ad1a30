"""Passes of a drafter's layer: stable rows, the last token of each chain, and nodes of trees.

Row `r` of a sequence joins the target's feature of position `r` with token `r + 1` and proposes token `r + 2`. Rows
made of true features are *stable* and stay in the drafter's cache. Rows that continue from the layer's own output are
*drafted*; they are dropped once true features for their positions arrive (Li et al., 2401.15077, section 4).

Responsible for which rows a pass runs and where their outputs are kept. `drafter.py` decides what is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.draft_layer import DraftLayer, LayerOutput, Rows, StableRow, join_rows
from paceline.methods.autoregressive.sequence import (
    AutoregressiveSequence,
    DraftedChain,
    DraftedTree,
    StableRows,
)
from paceline.methods.autoregressive.tree_rule import TreeRule
from paceline.methods.choice import rank_children
from paceline.methods.drafter import DraftRequest, OutcomeRequest
from paceline.methods.feature_follower import FeatureFollower
from paceline.sampling.params import SamplingParams, VerifyMode
from paceline.target import Device, TapSpec
from paceline.target.kv.slot import Slot


class LayerPasses(FeatureFollower[AutoregressiveSequence]):
    """Runs rows of several sequences through a layer.

    Args:
        layer: proposes tokens.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        vocab: draft ids.
        tap: what is read from the target.
        max_positions: the longest text that is drafted for.
        rule: how trees grow.
        device: where the layer runs.
        num_layers: of the cache.
    """

    def __init__(
        self,
        layer: DraftLayer,
        draft_ids: Tensor | None,
        vocab: int,
        tap: TapSpec,
        max_positions: int,
        rule: TreeRule,
        device: Device,
        num_layers: int = 1,
    ) -> None:
        super().__init__(layer, tap, max_positions, device, num_layers)
        self._layer = layer
        self._draft_ids = draft_ids
        self._target_id_of: list[int] | None = None if draft_ids is None else draft_ids.tolist()
        self._vocab = vocab
        self._rule = rule

    def _begin(self, tokens: list[int], slot: Slot, slot_id: int) -> AutoregressiveSequence:
        return AutoregressiveSequence(tokens, slot, slot_id)

    def _reserve(self, states: Sequence[AutoregressiveSequence], num_rows: Sequence[int]) -> None:
        self._cache.reserve([(state.slot_id, count) for state, count in zip(states, num_rows, strict=True)])

    def _drop_drafted(self, state: AutoregressiveSequence) -> None:
        """Drop drafted rows."""
        state.slot.num_pending = 0

    def _run_stable_rows(self, states: Sequence[AutoregressiveSequence]) -> None:
        """Run rows of the features that have arrived since the last pass, one pass over all sequences."""
        stable = self._take_stable_rows(states)
        if stable.states:
            self._reserve(stable.states, [part.num_rows for part in stable.rows])
            self._settle(stable, self._layer.forward(stable.rows, stable.last))

    def _take_stable_rows(self, states: Sequence[AutoregressiveSequence]) -> StableRows:
        """Rows of the features that have arrived since the last pass; drafted rows of those sequences are dropped."""
        behind = [state for state in states if state.pending and state.slot.length < len(state.tokens) - 1]
        rows, left = [], []
        for state in behind:
            self._drop_drafted(state)
            state.chain = state.tree = None
            features, first = join_rows(state.pending), state.slot.length
            count = min(int(features.shape[0]), len(state.tokens) - 1 - first)
            left.append([features[count:]] if count < features.shape[0] else [])
            tokens = state.tokens[first + 1 : first + 1 + count]
            rows.append(Rows(state.slot, tokens, features[:count], range(first, first + count)))
        return StableRows(behind, rows, left, [end - 1 for end in accumulate(part.num_rows for part in rows)])

    def _settle(self, stable: StableRows, output: LayerOutput) -> None:
        """Keep the outputs of stable rows. Called after the pass, because a pass may fail."""
        for place, (state, part, left) in enumerate(
            zip(stable.states, stable.rows, stable.left, strict=True)
        ):
            state.stable = StableRow(output, stable.last[place], place)
            state.pending = left
            state.slot.length += part.num_rows
            state.slot.num_pending -= part.num_rows

    def _run_drafted(self, begun: Sequence[tuple[AutoregressiveSequence, DraftedChain]]) -> None:
        """Run the last drafted token of each chain."""
        if not begun:
            return
        rows = []
        for state, chain in begun:
            # Token start + k - 1 is in row start + k - 2, the row of the position before it.
            position = chain.start + len(chain.tokens) - 2
            depths = [len(chain.tokens)]
            rows.append(Rows(state.slot, [chain.tokens[-1]], chain.state, [position], depths=depths))
        output = self._layer.forward(rows, range(len(rows)))
        for index, (_, chain) in enumerate(begun):
            chain.state, chain.logits = output.states[index : index + 1], output.logits[index : index + 1]

    def _run_nodes(
        self,
        wanted: Sequence[
            tuple[DraftRequest | OutcomeRequest, AutoregressiveSequence, DraftedTree, Sequence[int]]
        ],
    ) -> list[list[int]]:
        """Run nodes of several trees in one pass and propose their children; returns the proposals by tree."""
        proposed: list[list[int]] = [[] for _ in wanted]
        running = [i for i, (*_, nodes) in enumerate(wanted) if nodes]
        if not running:
            return proposed
        self._reserve([wanted[i][1] for i in running], [len(wanted[i][3]) for i in running])
        rows, positions, params = [], [], []
        for i in running:
            request, state, tree, nodes = wanted[i]
            assert state.stable is not None
            tokens, from_rows, depths, paths = tree.nodes.run(nodes)
            # The root's state comes last, where the index `ROOT` finds it.
            states = torch.cat((tree.states, state.stable.state))[from_rows]
            places = [tree.start - 2 + depth for depth in depths]
            rows.append(Rows(state.slot, tokens, states, places, paths, depths))
            positions += [tree.start + depth for depth in depths]
            params += [request.sampling] * len(nodes)
        output = self._layer.forward(rows, range(len(positions)))
        # In coupled mode a chance depends on how many tokens are ranked, so each width is ranked on its own.
        best = {
            branch: self._best(output, positions, params, branch)
            for branch in {wanted[i][2].branch for i in running}
        }
        first = 0
        for i in running:
            _, _, tree, nodes = wanted[i]
            span = slice(first, first + len(nodes))
            first += len(nodes)
            tree.states = torch.cat((tree.states, output.states[span]))
            log_probs, ids = best[tree.branch]
            proposed[i] = self._propose(tree, nodes, log_probs[span], ids[span])
        return proposed

    def _propose(
        self, tree: DraftedTree, nodes: Sequence[int], log_probs: list[list[float]], ids: list[list[int]]
    ) -> list[int]:
        if self._target_id_of is not None:
            ids = [[self._target_id_of[i] for i in row] for row in ids]
        return tree.nodes.propose(nodes, log_probs, ids)

    def _best(
        self,
        output: LayerOutput | StableRow,
        positions: Sequence[int],
        params: Sequence[SamplingParams],
        count: int,
    ) -> tuple[list[list[float]], list[list[int]]]:
        """What the target is likeliest to choose after each wanted row: log-probabilities and draft ids."""
        if any(param.resolved_mode is VerifyMode.COUPLED for param in params):
            return rank_children(output.logits, self._draft_ids, positions, params, count)
        return output.best(count)
