"""EAGLE-3's training objective: training-time test on text that the target wrote (2503.01840).

Responsible for what the draft layer reads, its loss and its held-out acceptance. Knows no optimisers, run checkpoints
or serving; called by :mod:`paceline.training.trainer`. Serving runs the same weights in
:mod:`paceline.methods.eagle3.drafter`; a test compares the two.

Rows and steps are those of :mod:`paceline.training.unroll`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.eagle.fused_shape import FUSED, Eagle3Shape, fused_input
from paceline.methods.tap_objective import TapObjective
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance, chain_hits
from paceline.training.block import DifferentiableBlock, rms_norm
from paceline.training.data import Batch
from paceline.training.head import head_best, softmax_head
from paceline.training.losses import linear_soft_cross_entropy
from paceline.training.objective import TargetReference
from paceline.training.unroll import UnrolledBlock, unroll

_STAGE_STARTS = (0.0, 0.1, 0.2, 0.3)  # fraction of the run from which 1, 2, 3, 4 steps are unrolled


class Eagle3Objective(TapObjective):
    """Loss and acceptance of an EAGLE-3 layer.

    Args:
        shape: sizes.
        parameters: float32 parameters by checkpoint name; see :meth:`Eagle3Shape.parameter_shapes`.
        embedding: the target's token embedding ``[target_vocab, target_hidden]``, frozen.
        target_head: the target's head ``[target_vocab, target_hidden]``, frozen.
        draft_ids: target id of every draft id, ascending, int64 ``[draft_vocab]``.
        tap_scale: root mean square of each tap entry, ``[num_taps * target_hidden]``. A residual stream has a few
            entries hundreds of times larger than the rest, and an optimiser's equal steps for all entries would swing
            the output. So ``fc`` is trained on taps divided by this scale; the export folds the scale into ``fc``.
        target: what the exported checkpoint says of its target.
        test_steps: unrolled steps of training-time test, after the curriculum's first stages.
        step_decay: weight ratio of one step's loss to the step before.
        dtype: compute type; parameters stay float32.
    """

    method = "eagle3"

    def __init__(
        self,
        shape: Eagle3Shape,
        parameters: dict[str, Tensor],
        embedding: Tensor,
        target_head: Tensor,
        draft_ids: Tensor,
        tap_scale: Tensor,
        target: TargetReference,
        test_steps: int = 4,
        step_decay: float = 0.8,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.target = target
        self.test_steps = test_steps
        self.step_decay = step_decay
        self._active_steps = test_steps
        self._embedding = embedding.to(dtype)
        super().__init__(shape.parameter_shapes(), parameters, target_head, draft_ids, tap_scale, dtype)

    def set_progress(self, fraction: float) -> None:
        """One unrolled step first, then more: an untrained layer's own output teaches little at a high cost."""
        stage = sum(fraction >= start for start in _STAGE_STARTS)
        finished = stage == len(_STAGE_STARTS)
        self._active_steps = self.test_steps if finished else min(self.test_steps, stage)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted sum of the steps' cross entropies against the target's distribution over the draft vocabulary."""
        row, position = self._targets(batch)
        if not row.numel():
            return self.zero_loss(), {}
        hidden = batch.need_hidden()[row, position].to(self.dtype)
        target_probs = softmax_head(hidden, self._target_head)  # [num_targets, draft_vocab]
        weights = self.compute_weights()
        total = torch.zeros(())
        metrics: dict[str, float] = {}
        for j, out in enumerate(self.unroll(weights, batch, self._active_steps)):
            step_loss = linear_soft_cross_entropy(
                out[row, position - 1 - j], weights["lm_head.weight"], target_probs
            )
            total = total + self.step_decay**j * step_loss
            metrics[f"loss_{j}"] = float(step_loss.detach())
        return total, metrics

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains; see :func:`paceline.training.acceptance.chain_hits`."""
        weights = self.compute_weights()
        head = weights["lm_head.weight"]
        outputs = self.unroll(weights, batch, EVAL_CHAIN)
        hits = chain_hits(batch, outputs, lambda states: self.draft_ids[head_best(states, head, 1)])
        return ChainAcceptance.from_chains(hits[..., 0])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        shape = self.shape.checkpoint_shape(self.target.tap_layers)
        shape["max_positions"] = self.target.max_positions
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.tensors())

    def _targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(row, position) pairs whose next token is part of an answer, if the target's best token can be drafted."""
        ok = torch.zeros_like(batch.is_answer)
        ok[:, :-1] = batch.is_answer[:, 1:]
        ok &= (batch.top_tokens >= 0) & (self._draft_of[batch.top_tokens.clamp_min(0)] >= 0)
        ok[:, : self.test_steps] = False
        row, position = ok.nonzero(as_tuple=True)
        return row, position

    def unroll(self, w: dict[str, Tensor], batch: Batch, steps: int) -> Iterator[Tensor]:
        """Yields the final-norm output ``[rows, length, hidden]`` of each step."""
        s = self.shape
        state = F.linear(batch.need_taps().to(self.dtype) * self._taps_gain, w["fc.weight"])
        layer = DifferentiableBlock(s.block_shape(), w, FUSED)

        def enter(ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return fused_input(layer, F.embedding(ids, self._embedding), state), state

        block = UnrolledBlock(layer, s.rope_theta, batch.tokens.shape[1], state.dtype)
        for out in unroll(block, batch.tokens, state, enter, steps):
            yield rms_norm(out, w["norm.weight"], s.rms_eps)
