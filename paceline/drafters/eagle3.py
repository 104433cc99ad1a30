"""EAGLE-3 (Li et al., 2503.01840): one decoder layer over the target's fused features, drafting chains or trees.

Row `r` of a sequence joins the target's fused feature of position `r` with token `r + 1` and proposes token `r + 2`.
Rows made of true features are *stable* and stay in the drafter's cache; rows that continue from the layer's own output
are *drafted* and fall away once true features for their positions arrive. `fc` runs on the target's side (the tap's
projection), so features come in at the drafter's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafters.base import (
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    UnknownDraftSequenceError,
    may_rank,
)
from paceline.drafters.checkpoint import CheckpointError, DrafterConfig, load_tensor, load_tensors
from paceline.drafters.choice import choose_chain_tokens, draw_chain_tokens, rank_children
from paceline.drafters.comb import comb_entry, num_draws
from paceline.drafters.eagle3_layer import (
    MAX_BEST,
    DraftLayer,
    Eagle3Layer,
    LayerOutput,
    LayerWeights,
    Rows,
    join_rows,
    parameter_shapes,
    tap_layers,
)
from paceline.drafters.eagle3_native import NativeEagle3Layer, runs_natively
from paceline.drafters.tree import ROOT, GrowingTree
from paceline.sampling import SamplingParams, VerifyMode
from paceline.target import Device, TapSpec
from paceline.target.kv_cache import KVCache, KVLayout, Slot
from paceline.target.weights import SafetensorsDir
from paceline.trie import DraftEntry, DrawRule, SiblingDraws

MAX_WIDTH = MAX_BEST
"""Most nodes that a tree expands at one depth."""

MIN_BRANCH = 4
"""Children that every expanded node proposes, at least. They cost no pass, and the likeliest of all nodes are kept.

With 7 nodes at depth 4, 2.30 tokens a pass in place of 2.23 with two children each (20 embedded prompts).
"""


@dataclass(slots=True)
class Chain:
    """A drafted chain that may be continued.

    Attributes:
        start: committed length it goes on from.
        tokens: drafted so far.
        log_probs: of each token.
        state: layer output behind the last token, `[1, hidden]`.
        logits: draft logits of what comes next, `[1, draft_vocab]`.
        draws: of each token, where tokens are drawn; log_probs then stays empty.
    """

    start: int
    state: Tensor
    logits: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    draws: list[SiblingDraws] = field(default_factory=list)

    def entry(self) -> DraftEntry:
        """As a draft entry; where tokens were drawn, with their siblings."""
        if self.draws:
            return comb_entry(self.start, self.draws)
        return DraftEntry.chain(self.start, tuple(self.tokens), tuple(self.log_probs))


@dataclass(slots=True)
class Tree:
    """A drafted tree that may be grown further.

    Attributes:
        start: committed length it goes on from.
        nodes: what was proposed.
        branch: proposals behind every node.
        states: layer output of each row that was run, `[rows, hidden]`.
    """

    start: int
    nodes: GrowingTree
    branch: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class StableRow:
    """The last stable row of a sequence, in the pass that ran it.

    Attributes:
        output: of that pass.
        row: the row.
        place: its place among the rows with logits.
    """

    output: LayerOutput
    row: int
    place: int

    @property
    def state(self) -> Tensor:
        """`[1, hidden]`."""
        return self.output.states[self.row : self.row + 1]

    @property
    def logits(self) -> Tensor:
        """`[1, draft_vocab]`."""
        return self.output.logits[self.place : self.place + 1]

    def best(self, count: int) -> tuple[list[list[float]], list[list[int]]]:
        """As :meth:`LayerOutput.best`, of this row alone."""
        log_probs, ids = self.output.best(count)
        return [log_probs[self.place]], [ids[self.place]]


@dataclass(slots=True)
class SequenceState:
    """What the drafter knows of a sequence: its tokens, features not yet run, and its slot."""

    tokens: list[int]
    slot: Slot
    slot_id: int
    pending: list[Tensor] = field(default_factory=list)  # features behind the stable rows, each [n, hidden]
    num_features: int = 0
    stable: StableRow | None = None  # absent before the first
    chain: Chain | None = None
    tree: Tree | None = None

    @property
    def is_ready(self) -> bool:
        """True once features for all positions but the root's are in."""
        return self.num_features >= len(self.tokens) - 1 and len(self.tokens) > 1


class Eagle3Drafter:
    """Drafts with an EAGLE-3 layer; see `paceline.drafters.base.Drafter`."""

    method: ClassVar[str] = "eagle3"
    formats: ClassVar[tuple[str, ...]] = ("paceline",)
    reads: ClassVar[str] = "three layers, fused"

    def __init__(
        self, layer: DraftLayer, draft_ids: Tensor, tap: TapSpec, max_positions: int, device: Device
    ) -> None:
        self._layer = layer
        self._draft_ids = draft_ids  # [draft_vocab] int64: target id of each draft id
        self._target_id_of: list[int] = draft_ids.tolist()
        self.tap: TapSpec | None = tap
        self.max_positions = max_positions
        layout = KVLayout(1, layer.num_kv_heads, layer.head_dim, layer.dtype, device.torch_device)
        self._cache = KVCache(layout)
        self._sequences: dict[int, SequenceState] = {}

    @classmethod
    def read_tap(cls, directory: Path, config: DrafterConfig) -> TapSpec:
        """The tap of a checkpoint: its layers, fused by `fc` on the target's side."""
        return TapSpec(layers=tap_layers(config), projection=load_tensor(directory, "fc.weight"))

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> Eagle3Drafter:
        """Load a checkpoint; the embedding is the target's own."""
        with torch.inference_mode():
            tensors = load_tensors(directory, parameter_shapes(config))
            with SafetensorsDir(target_dir) as weights:
                embedding = weights.get("model.embed_tokens.weight", dtype).to(device.torch_device)
            vocab, width = config.size("target_vocab"), config.size("target_hidden")
            if tuple(embedding.shape) != (vocab, width):
                raise CheckpointError(
                    f"the target's embedding is {tuple(embedding.shape)}, not {(vocab, width)}"
                )
            offsets = tensors["d2t"].to(torch.int64)  # target id - draft id
            draft_ids = offsets + torch.arange(offsets.shape[0])
            if (
                int(draft_ids.min()) < 0
                or int(draft_ids.max()) >= vocab
                or len(draft_ids.unique()) < len(draft_ids)
            ):
                raise CheckpointError("d2t does not map draft ids to distinct target ids")
            layer_weights = LayerWeights.read(config, tensors, embedding, dtype)
            native = runs_natively(layer_weights, device)
            layer: DraftLayer = (
                NativeEagle3Layer(layer_weights) if native else Eagle3Layer(layer_weights, device)
            )
            tap = TapSpec(layers=tap_layers(config), projection=tensors["fc.weight"])
            return cls(layer, draft_ids.to(device.torch_device), tap, config.size("max_positions"), device)

    def open(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Start following a sequence."""
        self.close(sequence_id)
        # A slot may be one that grew while drafting, and what grew then can only be written in that mode.
        with torch.inference_mode():
            slot_id = self._cache.open(len(tokens) + 64)
        self._sequences[sequence_id] = SequenceState(list(tokens), self._cache.get(slot_id), slot_id)

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
        """Take in fused features."""
        state = self._get(sequence_id)
        skip = state.num_features - start
        if skip < 0:
            raise DrafterError(
                f"sequence {sequence_id}: features from {state.num_features} to {start - 1} are missing"
            )
        if features.ndim != 2 or features.shape[1] != self._layer.hidden:
            raise DrafterError(f"features must be [n, {self._layer.hidden}], not {list(features.shape)}")
        if skip >= features.shape[0]:
            return
        fresh = features[skip:].to(device=self._layer.where, dtype=self._layer.dtype)
        state.pending.append(fresh)
        state.num_features += int(fresh.shape[0])

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftEntry | None]:
        """Draft chains, and trees for requests with more nodes than tokens, all sequences together."""
        with torch.inference_mode():
            able = [r for r in requests if self._can_draft(r)]
            self._run_stable_rows([self._sequences[r.sequence_id] for r in able])
            chains = [r for r in able if r.max_nodes <= r.num_tokens or not r.may_rank]
            self._grow_chains(chains)
            entries: dict[int, DraftEntry] = {}
            for request in able:
                state = self._sequences[request.sequence_id]
                if request in chains:
                    chain = state.chain
                    assert chain is not None
                    entries[request.sequence_id] = chain.entry()
                else:
                    entries[request.sequence_id] = self._grow_tree(state, request)
        return [entries.get(request.sequence_id) for request in requests]

    def draft_outcomes(
        self, requests: Sequence[OutcomeRequest], may_go_on: Callable[[], bool] = lambda: True
    ) -> list[DraftEntry | None]:
        """Draft past likely outcomes, on the layer's own outputs; all sequences together, pass by pass."""
        with torch.inference_mode():
            growing = [
                (request, state, tree)
                for request in requests
                if (tree := self._tree_of(request, state := self._get(request.sequence_id))) is not None
            ]
            if may_go_on():
                self._run_nodes([(r, s, t, t.nodes.sent_not_run()) for r, s, t in growing])
            ends = [t.nodes.outcomes(r.max_outcomes, r.share, r.num_shares) for r, _, t in growing]
            tips = list(ends)
            for step in range(max((request.num_tokens for request, _, _ in growing), default=0)):
                if not may_go_on():
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

    def _get(self, sequence_id: int) -> SequenceState:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownDraftSequenceError(f"sequence {sequence_id} is not open") from None

    def _can_draft(self, request: DraftRequest) -> bool:
        state = self._get(request.sequence_id)
        return (
            request.num_tokens > 0
            and state.is_ready
            and len(state.tokens) + request.num_tokens <= self.max_positions
        )

    def _reserve(self, states: Sequence[SequenceState], num_rows: Sequence[int]) -> None:
        self._cache.reserve([(state.slot_id, count) for state, count in zip(states, num_rows, strict=True)])

    def _run_stable_rows(self, states: Sequence[SequenceState]) -> None:
        """Run what true features have come in since, dropping drafted rows; one pass over all sequences."""
        behind = [state for state in states if state.pending and state.slot.length < len(state.tokens) - 1]
        if not behind:
            return
        rows, left = [], []
        for state in behind:
            state.slot.num_pending = 0  # drafted rows fall away
            state.chain = state.tree = None
            features, first = join_rows(state.pending), state.slot.length
            count = min(int(features.shape[0]), len(state.tokens) - 1 - first)
            left.append([features[count:]] if count < features.shape[0] else [])
            tokens = state.tokens[first + 1 : first + 1 + count]
            rows.append(Rows(state.slot, tokens, features[:count], range(first, first + count)))
        self._reserve(behind, [part.num_rows for part in rows])
        ends = list(accumulate(part.num_rows for part in rows))
        output = self._layer.forward(rows, [end - 1 for end in ends])
        for index, (state, part) in enumerate(zip(behind, rows, strict=True)):
            state.stable = StableRow(output, ends[index] - 1, index)
            state.pending = left[index]  # not before the pass, which may fail for another sequence
            state.slot.length += part.num_rows
            state.slot.num_pending = 0

    def _grow_chains(self, requests: Sequence[DraftRequest]) -> None:
        """Extend each request's chain to its length, one token of all sequences at a time."""
        growing = []
        for request in requests:
            state = self._sequences[request.sequence_id]
            if state.chain is None or state.chain.start != len(state.tokens):
                assert state.stable is not None
                state.slot.num_pending = 0
                state.tree = None
                state.chain = Chain(len(state.tokens), state.stable.state, state.stable.logits)
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

    def _draw(self, logits: Tensor, growing: Sequence[tuple[DraftRequest, Chain]]) -> None:
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

    def _run_drafted(self, begun: Sequence[tuple[SequenceState, Chain]]) -> None:
        """Run the last drafted token of each chain."""
        if not begun:
            return
        rows = []
        for state, chain in begun:
            # Token start + k - 1 stands in row start + k - 2, the row of the position before it.
            position = chain.start + len(chain.tokens) - 2
            rows.append(Rows(state.slot, [chain.tokens[-1]], chain.state, [position]))
        output = self._layer.forward(rows, range(len(rows)))
        for index, (_, chain) in enumerate(begun):
            chain.state, chain.logits = output.states[index : index + 1], output.logits[index : index + 1]

    def _grow_tree(self, state: SequenceState, request: DraftRequest) -> DraftEntry:
        """Grow a dynamic tree and send its likeliest nodes (EAGLE-2, 2406.16858, section 4)."""
        assert state.stable is not None
        state.slot.num_pending = 0
        state.chain = None
        start = len(state.tokens)
        width = min(MAX_WIDTH, max(2, request.max_nodes // request.num_tokens + 1))
        branch = min(max(width, MIN_BRANCH), len(self._target_id_of))
        tree = Tree(start, GrowingTree(), branch, state.stable.state[:0])
        state.tree = tree
        best = self._best(state.stable, [start], [request.sampling], branch)
        proposed = self._propose(tree, [ROOT], *best)
        for _ in range(request.num_tokens - 1):
            nodes = tree.nodes.best(proposed, width)
            (proposed,) = self._run_nodes([(request, state, tree, nodes)])
        return tree.nodes.entry(start, tree.nodes.send(request.max_nodes))

    def _tree_of(self, request: OutcomeRequest, state: SequenceState) -> Tree | None:
        """The tree to grow: the last draft as it is, if it still goes on from the committed tokens."""
        tree = state.tree
        if tree is None or tree.start != len(state.tokens):
            return None
        if request.num_tokens < 1 or not may_rank(request.sampling):
            return None
        last = tree.start + tree.nodes.depth + request.num_tokens
        return tree if last <= self.max_positions else None

    def _run_nodes(
        self, wanted: Sequence[tuple[DraftRequest | OutcomeRequest, SequenceState, Tree, Sequence[int]]]
    ) -> list[list[int]]:
        """Run nodes of several trees in one pass, and propose what follows each; the proposals by tree."""
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
            # The root's state stands in front, so that its children find it where `ROOT` points.
            states = torch.cat((tree.states, state.stable.state))[from_rows]
            rows.append(Rows(state.slot, tokens, states, [tree.start - 2 + depth for depth in depths], paths))
            positions += [tree.start + depth for depth in depths]
            params += [request.sampling] * len(nodes)
        output = self._layer.forward(rows, range(len(positions)))
        branch = max(wanted[i][2].branch for i in running)
        log_probs, ids = self._best(output, positions, params, branch)
        first = 0
        for i in running:
            _, _, tree, nodes = wanted[i]
            span = slice(first, first + len(nodes))
            first += len(nodes)
            tree.states = torch.cat((tree.states, output.states[span]))
            proposed[i] = self._propose(tree, nodes, log_probs[span], ids[span])
        return proposed

    def _propose(
        self, tree: Tree, nodes: Sequence[int], log_probs: list[list[float]], ids: list[list[int]]
    ) -> list[int]:
        targets = [[self._target_id_of[i] for i in row[: tree.branch]] for row in ids]
        return tree.nodes.propose(nodes, [row[: tree.branch] for row in log_probs], targets)

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
