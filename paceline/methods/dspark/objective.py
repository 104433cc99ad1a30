"""DSpark's training objective: DFlash's blocks, with a Markov and a confidence head (2607.05147, sections 3 and 5).

Responsible for what DSpark adds to :mod:`paceline.methods.block_diffusion.objective`: the heads' part of the logits,
which reads the text's own tokens before each row; a loss of three parts; and temperatures of confidences, fitted on
held-out chains. Serving runs the same weights in :mod:`paceline.methods.dspark.drafter`; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.block_diffusion.blocks import Blocks
from paceline.methods.block_diffusion.objective import BlockObjective, DFlashShape
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.dspark.heads import MARKOV_IN, MARKOV_OUT, HeadPlan
from paceline.methods.dspark.temperatures import fit_temperatures, path_errors
from paceline.training.data import Batch
from paceline.training.objective import TargetReference


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the loss's parts.

    Attributes:
        tokens: cross entropy against the text.
        distance: sum of absolute differences between the drafter's and the target's probabilities.
        confidence: cross entropy of the confidence head against the acceptance that follows from that distance.
    """

    tokens: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0


class DSparkObjective(BlockObjective):
    """Loss and acceptance of a DSpark drafter.

    Args:
        shape: sizes of the layers.
        heads: which heads there are.
        parameters: float32 parameters by checkpoint name, the heads' among them.
        embedding: the target's ``[target_vocab, hidden]``, frozen.
        head: the target's ``[target_vocab, hidden]``, frozen.
        draft_ids: target id of every draft id, ascending, int64 ``[draft_vocab]``.
        tap_scale: as in :class:`paceline.methods.block_diffusion.objective.BlockObjective`, as are the arguments below.
        target: what the exported checkpoint says of its target.
        loss_weights: weights of the loss's parts.
    """

    method = "dspark"

    def __init__(
        self,
        shape: DFlashShape,
        heads: HeadPlan,
        parameters: dict[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        draft_ids: Tensor,
        tap_scale: Tensor,
        target: TargetReference,
        num_anchors: int = 64,
        decay: float = 4.0,
        loss_weights: LossWeights = LossWeights(),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.heads = heads
        self.loss_weights = loss_weights
        self._held_out: list[tuple[Tensor, Tensor]] = []  # log-odds and outcomes since the last step
        super().__init__(
            shape, parameters, embedding, head, draft_ids, tap_scale, target, num_anchors, decay, dtype
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers' tensors and the heads'."""
        s = self.shape
        own = self.heads.parameter_shapes(s.hidden, s.target_vocab, s.draft_vocab)
        return {**super().parameter_shapes(), **own}

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The loss of blocks after random anchors."""
        self._held_out.clear()  # these chains belong to older weights
        return super().loss(batch)

    def observe(
        self, weights: dict[str, Tensor], states: Tensor, anchors: Tensor, proposed: Tensor, is_right: Tensor
    ) -> None:
        """Keeps confidences of held-out chains, and whether their tokens were right: temperatures are fitted on
        both."""
        if self.heads.has_confidence:
            previous = torch.cat([anchors[:, None], proposed[:, :-1]], dim=1)
            odds = self.heads.confidence(weights, states, F.embedding(previous, weights[MARKOV_IN]))
            self._held_out.append((odds.float(), is_right))

    def block_loss(
        self, weights: dict[str, Tensor], batch: Batch, blocks: Blocks
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of given blocks: three parts, each a mean weighted by the place in the block."""
        hidden = batch.need_hidden()
        out = self.forward(weights, batch, blocks.anchors)
        text, block = blocks.weights.any(-1).nonzero(as_tuple=True)
        if not text.numel():
            return out.sum() * 0.0, {}
        states, places = out[text, block], blocks.places[text, block]  # [blocks, drafts, ...]
        logits, confidence = self.logits(weights, states, batch.tokens[text[:, None], places])
        counted = blocks.weights[text, block].to(logits.dtype)
        # Labels that cannot be drafted have weight 0.
        labels = self._draft_of[blocks.labels[text, block]].clamp_min(0)
        log_probs = logits.log_softmax(-1)
        head = self._target_head.to(out.dtype)
        teacher = (hidden[text[:, None], places].to(out.dtype) @ head.T).to(logits.dtype).softmax(-1)
        tokens = -log_probs.gather(-1, labels[..., None]).squeeze(-1)
        distance = (log_probs.exp() - teacher).abs().sum(-1)  # [blocks, drafts], from 0 to 2
        total = counted.sum()
        parts = {"tokens": (tokens * counted).sum() / total, "distance": (distance * counted).sum() / total}
        value = self.loss_weights.tokens * parts["tokens"] + self.loss_weights.distance * parts["distance"]
        if confidence is not None:
            accepted = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
            error = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
            parts["confidence"] = (error * counted).sum() / total
            value = value + self.loss_weights.confidence * parts["confidence"]
        return value, {f"loss_{name}": float(part.detach()) for name, part in parts.items()}

    def logits(self, w: dict[str, Tensor], states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draft logits of whole blocks, given the tokens before each row, and log-odds of the confidences.

        Args:
            w: parameters in the compute type.
            states: ``[blocks, drafts, hidden]``, from :meth:`forward`.
            previous: int64 ``[blocks, drafts]``.

        Returns:
            ``[blocks, drafts, draft_vocab]``, and ``[blocks, drafts]`` or None; at least float32.
        """
        embedded = F.embedding(previous, w[MARKOV_IN])
        memory = states.new_zeros(states.shape[0], self.heads.rank)
        mixed = []
        for k in range(states.shape[1]):
            one, memory = self.heads.mix(w, states[:, k], embedded[:, k], memory)
            mixed.append(one)
        wide = torch.promote_types(states.dtype, torch.float32)
        base = (states @ self._target_head.to(states.dtype).T).to(wide)
        logits = base + (torch.stack(mixed, dim=1) @ w[MARKOV_OUT].T).to(wide)
        if not self.heads.has_confidence:
            return logits, None
        return logits, self.heads.confidence(w, states, embedded).to(wide)

    def propose(self, weights: dict[str, Tensor], states: Tensor, anchors: Tensor) -> Tensor:
        """Chains that choose the likeliest token row by row, int64 ``[blocks, drafts]``."""
        previous, chosen = anchors, []
        memory = states.new_zeros(states.shape[0], self.heads.rank)
        for k in range(states.shape[1]):
            embedded = F.embedding(previous, weights[MARKOV_IN])
            mixed, memory = self.heads.mix(weights, states[:, k], embedded, memory)
            logits = (states[:, k] @ self._target_head.T).float() + (mixed @ weights[MARKOV_OUT].T).float()
            previous = self.draft_ids[logits.argmax(-1)]
            chosen.append(previous)
        return torch.stack(chosen, dim=1)

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json``, with temperatures fitted on the last evaluation, and ``model.safetensors``."""
        shape = self.checkpoint_shape() | {
            "markov_head": self.heads.markov.value,
            "markov_rank": self.heads.rank,
            "confidence_head": self.heads.has_confidence,
            "confidence_reads_token": self.heads.confidence_reads_token,
        }
        if self._held_out:
            odds, is_right = (torch.cat(parts) for parts in zip(*self._held_out, strict=True))
            half = len(odds) // 2  # fitted on one half, judged on the other: chains of one text are adjacent
            temperatures = fit_temperatures(odds[half:], is_right[half:])
            shape["confidence_temperatures"] = [round(value, 4) for value in temperatures]
            for name, used in (("raw", [1.0] * len(temperatures)), ("scaled", temperatures)):
                errors = path_errors(odds[:half], is_right[:half], used) if half else []
                facts = facts | {f"heldout_path_error_{name}": [round(error, 4) for error in errors]}
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.tensors())
