"""P-EAGLE's training objective: all depths of a draft in one pass (2602.01469).

Responsible for the drafter's rows, its loss and its held-out acceptance. Knows no optimisers, run checkpoints or
serving; called by :mod:`paceline.training.trainer`. Serving runs the same weights in
:mod:`paceline.methods.p_eagle.drafter`; a test compares the two.

Row ``(anchor, depth)`` has position ``r = anchor + depth`` and predicts token ``r + 2``, as EAGLE-3's row ``r`` does.
At depth 0 it joins the target's features at ``r`` with token ``r + 1``. Deeper rows hold one shared learned feature and
the mask token's embedding; they see nothing after their anchor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.eagle.fused_shape import FUSED, Eagle3Shape, fused_input, trained_shapes
from paceline.methods.one_pass.acceptance import one_pass_acceptance
from paceline.methods.one_pass.rows import FlatRows, sample_rows, segments
from paceline.methods.p_eagle.accumulation import accumulate
from paceline.methods.tap_objective import TapObjective
from paceline.model.rope import rotation_at
from paceline.training.acceptance import ChainAcceptance
from paceline.training.block import DifferentiableBlock, rms_norm
from paceline.training.data import Batch
from paceline.training.head import head_argmax, softmax_head
from paceline.training.losses import linear_soft_cross_entropy
from paceline.training.objective import TargetReference


@dataclass(frozen=True, slots=True)
class PEagleShape(Eagle3Shape):
    """Sizes of a P-EAGLE drafter: EAGLE-3's layer, plain layers above it, and its own embedding.

    Attributes:
        num_layers: layers, the fused one included.
        num_depths: depths trained, which is the longest chain it can draft.
        mask_token: target id whose embedding row replaces a token that is not known yet.
    """

    num_layers: int
    num_depths: int
    mask_token: int

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by their names in the public checkpoint format."""
        taps = range(self.num_taps)
        return {
            **trained_shapes(DrafterConfig("p_eagle", "", shape=self.checkpoint_shape(taps))),
            "embed_tokens.weight": (self.target_vocab, self.target_hidden),
            "mask_hidden": (1, 1, self.num_taps * self.target_hidden),
        }


class PEagleObjective(TapObjective):
    """Loss and acceptance of a P-EAGLE drafter.

    Args:
        shape: sizes.
        parameters: float32 parameters by checkpoint name; see :meth:`PEagleShape.parameter_shapes`.
        target_head: the target's head ``[target_vocab, target_hidden]``, frozen.
        draft_ids: target id of every draft id, ascending, int64 ``[draft_vocab]``.
        tap_scale: as in :class:`paceline.methods.eagle3.objective.Eagle3Objective`. ``mask_hidden`` is trained in units
            of scaled taps and exported in the taps' own.
        target: what the exported checkpoint says of its target.
        keep_ratio: rows kept at each depth over those of the depth before.
        keep_floor: least fraction of rows at any depth; 0 is the paper's rule.
        num_segments: segments of every text, each with its own graph: less memory, same gradients.
        dtype: compute type; parameters stay float32.
    """

    method = "p_eagle"
    in_tap_units = ("mask_hidden",)

    def __init__(
        self,
        shape: PEagleShape,
        parameters: dict[str, Tensor],
        target_head: Tensor,
        draft_ids: Tensor,
        tap_scale: Tensor,
        target: TargetReference,
        keep_ratio: float = 0.7,
        keep_floor: float = 0.0,
        num_segments: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.target = target
        self.keep_ratio = keep_ratio
        self.keep_floor = keep_floor
        self.num_segments = num_segments
        super().__init__(shape.parameter_shapes(), parameters, target_head, draft_ids, tap_scale, dtype)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean cross entropy of kept rows against the target's distribution over the draft vocabulary."""
        parts = segments(self.sample(batch), batch.lengths.tolist(), self.num_segments)
        weights = self.compute_weights()
        metrics: dict[str, float] = {}
        if self.num_segments == 1:
            return self.part_loss(weights, batch, parts[0], self.count(batch, parts), metrics), metrics
        total = self.count(batch, parts)
        names = list(self._parameters)

        def losses() -> Iterator[Tensor]:
            for part in parts:
                # Casts for each part again: a graph that reaches the parameters is freed with its part.
                yield self.part_loss(self.compute_weights(), batch, part, total, metrics)

        return accumulate(losses(), [self._parameters[name] for name in names]), metrics

    def sample(self, batch: Batch) -> list[Tensor]:
        """Sampled rows of each text: anchors and depths, ``[2, n]``."""
        s = self.shape
        answers = _row_targets(batch.is_answer)
        return [
            sample_rows(answers[i, :length], s.num_depths, self.keep_ratio, self.keep_floor)
            for i, length in enumerate(batch.lengths.tolist())
        ]

    def compute_weights(self) -> dict[str, Tensor]:
        """Parameters in the compute type, but for the embedding, of which few rows are read."""
        return {k: p if k == "embed_tokens.weight" else p.to(self.dtype) for k, p in self._parameters.items()}

    def count(self, batch: Batch, parts: list[FlatRows]) -> int:
        """Rows of all parts that have a loss."""
        usable = self._usable(batch)
        return sum(int((part.is_own & usable.gather(1, part.positions)).sum()) for part in parts)

    def part_loss(
        self, weights: dict[str, Tensor], batch: Batch, rows: FlatRows, total: int, metrics: dict[str, float]
    ) -> Tensor:
        """What some rows contribute to the mean over ``total`` rows; adds each depth's part to ``metrics``."""
        states = batch.need_hidden()
        out = self.forward(weights, batch, rows)
        value = out.sum() * 0.0
        usable = self._usable(batch)
        text, row = (rows.is_own & usable.gather(1, rows.positions)).nonzero(as_tuple=True)
        if not text.numel():
            return value
        place = torch.full(usable.shape, -1, dtype=torch.int64)
        wanted = torch.zeros_like(usable)
        wanted[text, rows.positions[text, row]] = True
        place[wanted] = torch.arange(int(wanted.sum()))
        # Row at position r predicts what the target chose at position r + 1.
        hidden = F.pad(states[:, 1:], (0, 0, 0, 1))[wanted].to(weights["lm_head.weight"].dtype)
        target_probs = softmax_head(hidden, self._target_head.to(hidden.dtype))  # [positions, draft_vocab]
        depth = rows.depths[text, row]
        for d in range(self.shape.num_depths):
            at = depth == d
            count = int(at.sum())
            if count:
                probs = target_probs[place[text[at], rows.positions[text[at], row[at]]]]
                mean = linear_soft_cross_entropy(out[text[at], row[at]], weights["lm_head.weight"], probs)
                value = value + mean * (count / total)
                metrics[f"loss_{d}"] = metrics.get(f"loss_{d}", 0.0) + float(mean.detach()) * count / total
        return value

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains; see :func:`paceline.methods.one_pass.acceptance.one_pass_acceptance`."""
        weights = self.compute_weights()

        def forward(part: Batch, rows: FlatRows) -> Tensor:
            return self.forward(weights, part, rows)

        def best(states: Tensor) -> Tensor:
            return self.draft_ids[head_argmax(states, weights["lm_head.weight"])]

        return one_pass_acceptance(batch, self.shape.num_depths, 2, forward, best)

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        shape = self.shape.checkpoint_shape(self.target.tap_layers)
        shape["max_positions"] = self.target.max_positions
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.tensors())

    def _usable(self, batch: Batch) -> Tensor:
        """Positions of rows whose target is part of an answer and can be drafted: bool ``[texts, length]``."""
        top = F.pad(batch.top_tokens[:, 1:], (0, 1), value=-1)
        return _row_targets(batch.is_answer) & (top >= 0) & (self._draft_of[top.clamp_min(0)] >= 0)

    def forward(self, w: dict[str, Tensor], batch: Batch, rows: FlatRows) -> Tensor:
        """The final-norm output of every row, ``[texts, n, hidden]``.

        Args:
            w: parameters in the compute type, as :meth:`compute_weights` gives them.
            batch: texts with taps.
            rows: rows of each text.
        """
        s = self.shape
        dtype = w["fc.weight"].dtype
        fused = F.linear(batch.need_taps().to(dtype) * self._taps_gain.to(dtype), w["fc.weight"])
        is_true = rows.depths == 0
        at = rows.anchors[..., None].expand(-1, -1, s.hidden)
        masked = F.linear(w["mask_hidden"], w["fc.weight"])  # [1, 1, hidden]
        state = torch.where(is_true[..., None], fused.gather(1, at), masked)
        ids = F.pad(batch.tokens[:, 1:], (0, 1)).gather(1, rows.anchors)
        ids = torch.where(is_true, ids, s.mask_token)
        embedded = F.embedding(ids, w["embed_tokens.weight"]).to(dtype)
        cos, sin = rotation_at(s.rope_theta, s.head_dim, 0, int(rows.positions.max()) + 1, dtype)
        rotation = cos[rows.positions], sin[rows.positions]  # [texts, n, 1, head_dim]
        pattern = rows.pattern(dtype)
        for index in range(s.num_layers):
            block = DifferentiableBlock(s.block_shape(), w, f"layers.{index}." if index else FUSED)
            read = block.norm("input_layernorm", state) if index else fused_input(block, embedded, state)
            state = block.forward(read, state, rotation, pattern.attend)
        return rms_norm(state, w["norm.weight"], s.rms_eps)


def _row_targets(is_answer: Tensor) -> Tensor:
    """Positions whose row predicts an answer's token, which is two positions later. Bool, like ``is_answer``."""
    return F.pad(is_answer[:, 2:], (0, 2))
