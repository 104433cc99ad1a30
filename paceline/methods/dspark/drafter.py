"""DSpark (2607.05147): DFlash's block, with a small head that makes each token depend on the one before it.

The block is run once. Then its rows are visited in order: a row's logits are the block's plus a bias that depends on
the token chosen before (`heads.py`). So draws come from a distribution given the earlier draws, which is sent along,
and verification of draws is exact. Trees grow by EAGLE-2's rule, because the children of a node depend on it; a depth
costs a product of low rank and no pass.

If tokens are not drawn, a chain's `log_probs` are the logarithms of the confidence head's acceptance probabilities, and
the verifier's calibration reads them as such. Drawn tokens carry the confidence that was stated before the draw, so the
verifier may use it and stay exact. A confidence is the same for all children of a node, so ranked trees send the
tokens' own probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft_layer import join_rows
from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.autoregressive.tree_rule import DynamicRule
from paceline.methods.backend import pack_rows
from paceline.methods.block_diffusion.drafter import (
    BlockDrafter,
    BlockSequence,
    make_block_layer,
    read_shared,
)
from paceline.methods.block_diffusion.layer import DFlashLayer, dflash_shapes
from paceline.methods.checkpoint import DrafterConfig, load_tensors
from paceline.methods.choice import rank_children
from paceline.methods.dspark.heads import MARKOV_IN, MARKOV_OUT, HeadPlan
from paceline.methods.one_pass.round import RoundRequest, choose_rows
from paceline.methods.target_vocabulary import read_draft_ids
from paceline.methods.tree import ROOT, GrowingTree
from paceline.target import Device, TapSpec


def dspark_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint by their public names (see docs/methods/dspark.md)."""
    sizes = config.size("hidden"), config.size("target_vocab"), config.size("draft_vocab")
    return {**dflash_shapes(config), **HeadPlan.read(config).parameter_shapes(*sizes)}


class SequentialHeads:
    """Markov and confidence head, ready to run.

    Args:
        plan: which heads there are.
        tensors: by public name.
        device: where they run.
        dtype: of products.
    """

    def __init__(
        self, plan: HeadPlan, tensors: dict[str, Tensor], device: Device, dtype: torch.dtype
    ) -> None:
        self._plan = plan
        self._tensors = {
            name: tensor.to(device.torch_device, dtype)
            for name, tensor in tensors.items()
            if name.startswith(("markov_head.", "confidence_head."))
        }
        out = self._tensors.pop(MARKOV_OUT)
        self._out = pack_rows(out, None, device, as_float=True)
        self.where = device.torch_device

    def memory(self, count: int) -> Tensor:
        """The memory of new blocks, `[count, rank]`."""
        return self._tensors[MARKOV_IN].new_zeros(count, self._plan.rank)

    def log_confidences(self, log_odds: Tensor, depths: Sequence[int]) -> list[float]:
        """Natural logarithms of scaled confidences.

        Args:
            log_odds: `[n]`, from :meth:`step`.
            depths: of the rows.
        """
        scaled = log_odds / torch.tensor(
            [self._plan.temperature(depth) for depth in depths], device=self.where
        )
        return F.logsigmoid(scaled).clamp_max(0.0).tolist()

    def step(
        self, states: Tensor, previous: Sequence[int], memory: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Visit one row of each of several blocks, or of nodes of trees over them.

        Args:
            states: `[n, hidden]`, the rows' outputs.
            previous: target id of the token before each.
            memory: `[n, rank]`.

        Returns:
            The bias on logits `[n, draft_vocab]` float32; the log-odds of acceptance `[n]` float32, None without that
            head; and the memory after these rows.
        """
        embedded = F.embedding(torch.tensor(previous, device=self.where), self._tensors[MARKOV_IN])
        mixed, memory = self._plan.mix(self._tensors, states, embedded, memory)
        confidence = None
        if self._plan.has_confidence:
            confidence = self._plan.confidence(self._tensors, states, embedded).float()
        return self._out(mixed).float(), confidence, memory


class DSparkDrafter(BlockDrafter):
    """Drafts with a block whose rows are visited in order; see `paceline.methods.drafter.Drafter`.

    Args:
        layer: DFlash's.
        heads: the heads that are applied row by row.
        draft_ids: `[draft_vocab]` int64 target id of each draft id; None where they are the same.
        draft_vocab: draft ids.
        tap: what is read from the target.
        max_positions: longest text that is drafted for.
        device: where the layer runs.
    """

    method: ClassVar[str] = "dspark"

    def __init__(
        self,
        layer: DFlashLayer,
        heads: SequentialHeads,
        draft_ids: Tensor | None,
        draft_vocab: int,
        tap: TapSpec,
        max_positions: int,
        device: Device,
    ) -> None:
        super().__init__(layer, draft_ids, draft_vocab, tap, max_positions, device)
        self._heads = heads
        self._rule = DynamicRule()

    @classmethod
    def load(
        cls, directory: Path, config: DrafterConfig, target_dir: Path, device: Device, dtype: torch.dtype
    ) -> DSparkDrafter:
        """Load a checkpoint; an embedding or head that it does not have comes from the target's directory.

        Raises:
            CheckpointError: sizes or tensors do not fit one another or the target.
        """
        with torch.inference_mode():
            tensors = load_tensors(directory, dspark_shapes(config))
            draft_ids = read_draft_ids(config, tensors["d2t"], device.torch_device)
            shared = read_shared(config, tensors, target_dir, draft_ids, device, dtype)
            return cls(
                make_block_layer(config, tensors, *shared, device, dtype),
                SequentialHeads(HeadPlan.read(config), tensors, device, dtype),
                draft_ids,
                config.size("draft_vocab"),
                cls.read_tap(directory, config),
                config.size("max_positions"),
                device,
            )

    def _choose(self, wanted: Sequence[RoundRequest]) -> dict[int, DraftEntry]:
        trees = [w for w in wanted if w.request.may_rank and w.request.max_nodes > w.depth]
        chains = [w for w in wanted if not (w.request.may_rank and w.request.max_nodes > w.depth)]
        self._lengthen([(w, self._get(w.request.sequence_id)) for w in chains])
        entries = {w.request.sequence_id: w.round.entry(w.start, w.depth) for w in chains}
        return entries | self._grow([(w, self._get(w.request.sequence_id)) for w in trees])

    def _lengthen(self, wanted: Sequence[tuple[RoundRequest, BlockSequence]]) -> None:
        """Choose the tokens that chains lack, one row of all of them at a time."""
        while growing := [(w, state) for w, state in wanted if len(w.round.tokens) < w.depth]:
            depths = [len(w.round.tokens) for w, _ in growing]
            rounds = [state.round for _, state in growing]
            previous = [(r.tokens or s.tokens)[-1] for r, (_, s) in zip(rounds, growing, strict=True)]
            fresh = self._heads.memory(1)
            memory = join_rows([fresh if r.memory is None else r.memory for r in rounds])
            states = join_rows([r.state(depth) for r, depth in zip(rounds, depths, strict=True)])
            bias, confidence, memory = self._heads.step(states, previous, memory)
            logits = join_rows([r.logits(depth, depth + 1) for r, depth in zip(rounds, depths, strict=True)])
            rows = [(w, depth) for (w, _), depth in zip(growing, depths, strict=True)]
            choose_rows(rows, logits + bias, self._draft_ids)
            sure = None if confidence is None else self._heads.log_confidences(confidence, depths)
            for i, ((w, _), current) in enumerate(zip(growing, rounds, strict=True)):
                current.memory = memory[i : i + 1]
                if sure is None:
                    continue
                if w.request.draw_rule is DrawRule.TOP:
                    current.log_probs[-1] = sure[i]
                else:
                    current.draws[-1] = replace(current.draws[-1], confidence=math.exp(sure[i]))

    def _grow(self, trees: Sequence[tuple[RoundRequest, BlockSequence]]) -> dict[int, DraftEntry]:
        """Grow trees by EAGLE-2's rule, one depth of all sequences at a time."""
        growing = [(w, state, GrowingTree()) for w, state in trees]
        expanded: list[list[int]] = [[ROOT] for _ in growing]
        # by node that was run, the root's last
        memories = [self._heads.memory(1) for _ in growing]
        for depth in range(max((w.depth for w, _ in trees), default=0)):
            rows: list[tuple[int, list[int], list[int]]] = []  # tree, tokens, places of the parents' memories
            for i, (w, state, tree) in enumerate(growing):
                if depth >= w.depth or not expanded[i]:
                    continue
                if depth == 0:
                    rows.append((i, [state.tokens[-1]], [-1]))
                    continue
                tokens, parents, *_ = tree.run(expanded[i])
                rows.append((i, tokens, parents))
            if not rows:
                break
            counts = [len(tokens) for _, tokens, _ in rows]
            rounds = [growing[i][1].round for i, *_ in rows]
            states = torch.cat([r.state(depth).expand(n, -1) for r, n in zip(rounds, counts, strict=True)])
            memory = torch.cat([memories[i][parents] for i, _, parents in rows])
            bias, _, memory = self._heads.step(states, [t for _, tokens, _ in rows for t in tokens], memory)
            logits = torch.cat(
                [r.logits(depth, depth + 1).expand(n, -1) for r, n in zip(rounds, counts, strict=True)]
            )
            wanted = [growing[i][0] for i, *_ in rows]
            branches = [
                min(self._rule.branch(w.depth, w.request.max_nodes), len(self._target_id_of)) for w in wanted
            ]
            log_probs, ids = rank_children(
                logits + bias,
                self._draft_ids,
                [len(growing[i][1].tokens) + depth for i, tokens, _ in rows for _ in tokens],
                [w.request.sampling for w, n in zip(wanted, counts, strict=True) for _ in range(n)],
                max(branches),
            )
            first = 0
            for (i, tokens, _), branch, part in zip(rows, branches, memory.split(counts), strict=True):
                w, _, tree = growing[i]
                span = slice(first, first + len(tokens))
                first += len(tokens)
                children = tree.propose(
                    expanded[i],
                    [row[:branch] for row in log_probs[span]],
                    [[self._target_id_of[k] for k in row[:branch]] for row in ids[span]],
                )
                # The root's memory stays last, where the index `ROOT` finds it.
                memories[i] = part if depth == 0 else torch.cat([memories[i][:-1], part, memories[i][-1:]])
                expanded[i] = self._rule.expand(tree, children, w.depth, w.request.max_nodes)
        return {
            w.request.sequence_id: tree.entry(w.start, self._rule.send(tree, w.depth, w.request.max_nodes))
            for w, _, tree in growing
        }
