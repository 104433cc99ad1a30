"""The training objective of DFlash, on which DSpark builds: blocks after random anchors of an answer, all in one pass.

The rule is that of 2602.06036, section 3.3.

Responsible for the drafter's forward pass, its loss and its held-out acceptance. Knows no optimisers, run checkpoints
or serving; called by :mod:`paceline.training.trainer`. Serving runs the same weights in
:mod:`paceline.methods.block_diffusion.drafter`; a test compares the two.

Row ``j`` of a block has position ``anchor + j``. It sees the features of all positions before the anchor, and its own
block. It sees no other block, and nothing of the text from the anchor on. Embedding and head are the target's and
frozen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.block_diffusion.blocks import (
    Blocks,
    attend_blocks,
    can_anchor,
    make_blocks,
    sample_anchors,
)
from paceline.methods.block_diffusion.layer import dflash_shapes
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.eagle.fused_shape import Eagle3Shape
from paceline.methods.tap_objective import TapObjective
from paceline.model.rope import rotation_at
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance
from paceline.training.block import DifferentiableBlock, rms_norm
from paceline.training.data import Batch
from paceline.training.head import head_argmax
from paceline.training.losses import linear_cross_entropy
from paceline.training.objective import TargetReference

_EVAL_ANCHORS = 64  # of a text at once


@dataclass(frozen=True, slots=True)
class DFlashShape(Eagle3Shape):
    """Sizes of a DFlash drafter; ``hidden`` equals ``target_hidden``.

    Attributes:
        num_layers: draft layers.
        block_size: rows of a block, the anchor included.
        mask_token: target id whose embedding the rows after the anchor read.
        anchor_first: whether rows propose the token after their position, the anchor included; else their own token.
        head_norms: whether queries and keys are normed head by head.
    """

    num_layers: int
    block_size: int
    mask_token: int
    anchor_first: bool = False
    head_norms: bool = True

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - (not self.anchor_first)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by their names in the public checkpoint format."""
        shapes = dflash_shapes(DrafterConfig("dflash", "", shape=self.checkpoint_shape(range(self.num_taps))))
        return {name: size for name, size in shapes.items() if name not in ("d2t", "t2d")}


class BlockObjective(TapObjective):
    """Loss and acceptance of a block drafter.

    Args:
        shape: sizes.
        parameters: float32 parameters by checkpoint name; see :meth:`DFlashShape.parameter_shapes`.
        embedding: the target's ``[target_vocab, hidden]``, frozen.
        head: the target's ``[target_vocab, hidden]``, frozen.
        draft_ids: target id of every draft id, ascending, int64 ``[draft_vocab]``.
        tap_scale: float32 ``[taps_width]`` that taps are divided by; the export folds it into ``fc``.
        target: what the exported checkpoint says of its target.
        num_anchors: most blocks of a text and step.
        decay: how slowly a block's later proposals lose weight, the published gamma.
        dtype: compute type; parameters stay float32.
    """

    def __init__(
        self,
        shape: DFlashShape,
        parameters: dict[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        draft_ids: Tensor,
        tap_scale: Tensor,
        target: TargetReference,
        num_anchors: int = 64,
        decay: float = 4.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.target = target
        self.num_anchors = num_anchors
        self.decay = decay
        self._embedding = embedding.to(dtype)
        super().__init__(self.parameter_shapes(), parameters, head, draft_ids, tap_scale, dtype)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is trained, by checkpoint name."""
        return self.shape.parameter_shapes()

    def sample(self, batch: Batch) -> Blocks:
        """Blocks after random anchors."""
        anchors, real = sample_anchors(can_anchor(batch), self.num_anchors)
        return make_blocks(
            batch, anchors, real, self.shape.num_drafts, self.decay, has_label=self._draft_of >= 0
        )

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted mean of the cross entropy against the text; weights fall with the place in the block."""
        return self.block_loss(self.compute_weights(), batch, self.sample(batch))

    def block_loss(
        self, weights: dict[str, Tensor], batch: Batch, blocks: Blocks
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of given blocks; each place's own mean is among the numbers to show."""
        out = self.forward(weights, batch, blocks.anchors)
        value, metrics = out.sum() * 0.0, {}
        total = float(blocks.weights.sum())
        for place in range(self.shape.num_drafts):
            chosen = blocks.weights[..., place] > 0
            if chosen.any():
                labels = self._draft_of[blocks.labels[..., place][chosen]]
                mean = linear_cross_entropy(out[:, :, place][chosen], self._target_head.to(out.dtype), labels)
                value = value + mean * (float(blocks.weights[..., place].sum()) / total)
                metrics[f"loss_{place}"] = float(mean.detach())
        return value, metrics

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains, for every answer position of greedily answered conversations."""
        weights = self.compute_weights()
        chain = min(EVAL_CHAIN, self.shape.num_drafts)
        counts = ChainAcceptance()
        for i in batch.is_greedy.nonzero().flatten().tolist():
            length = int(batch.lengths[i])
            answered = batch.is_answer[i, :length]
            if length <= chain:
                continue
            # The whole chain is the answer's, and the anchor has a context.
            anchors = answered.unfold(0, chain, 1).all(-1).nonzero().flatten() - 1
            anchors = anchors[anchors > 0]
            text = batch.part(slice(i, i + 1), length)
            for part in anchors.split(_EVAL_ANCHORS):
                out = self.forward(weights, text, part[None])[0, :, :chain]
                proposed = self.propose(weights, out, text.tokens[0, part])
                chosen = text.top_tokens[0][part[:, None] + torch.arange(chain)]
                self.observe(weights, out, text.tokens[0, part], proposed, proposed == chosen)
                counts = counts + ChainAcceptance.from_chains(proposed == chosen)
        return counts

    def observe(
        self, weights: dict[str, Tensor], states: Tensor, anchors: Tensor, proposed: Tensor, is_right: Tensor
    ) -> None:
        """Called with held-out chains, for measurements that a method makes on them.

        Args:
            weights: as of :meth:`forward`.
            states: ``[blocks, chain, hidden]``, from it.
            anchors: int64 ``[blocks]``, the anchors' tokens.
            proposed: int64 ``[blocks, chain]``.
            is_right: bool ``[blocks, chain]``: whether the target chose each token, whatever comes before it.
        """

    def propose(self, weights: dict[str, Tensor], states: Tensor, anchors: Tensor) -> Tensor:
        """Chains of likeliest tokens, int64 ``[blocks, drafts]``.

        Args:
            weights: as of :meth:`forward`.
            states: ``[blocks, drafts, hidden]``, from it.
            anchors: int64 ``[blocks]``, the anchors' tokens.
        """
        return self.draft_ids[head_argmax(states.flatten(0, 1), self._target_head)].view(states.shape[:2])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        fingerprint, name = self.target.fingerprint, self.target.name
        config = DrafterConfig(self.method, fingerprint, name, self.checkpoint_shape(), facts)
        save_drafter(folder, config, self.tensors())

    def checkpoint_shape(self) -> dict[str, Any]:
        """The layers' sizes for `config.json`."""
        shape = self.shape.checkpoint_shape(self.target.tap_layers)
        shape["max_positions"] = self.target.max_positions
        return shape

    def forward(self, w: dict[str, Tensor], batch: Batch, anchors: Tensor) -> Tensor:
        """Final-norm outputs of the rows that propose, ``[texts, blocks, drafts, hidden]``.

        Args:
            w: parameters in the compute type, as :meth:`compute_weights` gives them.
            batch: texts with taps.
            anchors: int64 ``[texts, blocks]``; a block at position 0 has no context.
        """
        s = self.shape
        dtype = w["fc.weight"].dtype
        num_texts, num_blocks = anchors.shape
        fused = F.linear(batch.need_taps().to(dtype) * self._taps_gain.to(dtype), w["fc.weight"])
        context = rms_norm(fused, w["hidden_norm.weight"], s.rms_eps)  # [texts, length, hidden]
        length = context.shape[1]
        ids = torch.full((num_texts, num_blocks, s.block_size), s.mask_token)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        state = F.embedding(ids.flatten(1), self._embedding).to(dtype)  # [texts, rows, hidden]
        positions = (anchors[..., None] + torch.arange(s.block_size)).flatten(1)
        cos, sin = rotation_at(s.rope_theta, s.head_dim, 0, length + s.block_size, dtype)
        rotation = cos[positions], sin[positions]  # [texts, rows, 1, head_dim]
        is_before = torch.arange(length) < anchors[..., None]  # [texts, blocks, length]
        for index in range(s.num_layers):
            block = DifferentiableBlock(s.block_shape(s.head_norms), w, f"layers.{index}.")
            keys, values = (block.heads(kind, context, (cos[:length], sin[:length])) for kind in "kv")
            attend = functools.partial(
                attend_blocks, context_keys=keys, context_values=values, is_before=is_before
            )
            state = block.forward(block.norm("input_layernorm", state), state, rotation, attend)
        proposing = state.unflatten(1, (num_blocks, -1))[:, :, s.block_size - s.num_drafts :]
        return rms_norm(proposing, w["norm.weight"], s.rms_eps)
