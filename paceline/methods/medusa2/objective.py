"""Medusa-2's training objective: heads and target trained together (2401.10774, "Medusa-2: joint training").

Responsible for the joint loss, its two stages, held-out acceptance, and for refusing to export a target that got worse.
The result is a pair: a tuned target directory, and heads that name its fingerprint. The original target's hidden states
were stored when it wrote the text, so training runs the tuned target alone. Knows no optimisers, run checkpoints or
serving; called by :mod:`paceline.training.trainer`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from paceline.contract.errors import ExportRefusedError
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.medusa2.tuned_backbone import TunedBackbone
from paceline.methods.medusa_heads.training import HeadStack, RankCounts, right_ranks
from paceline.models import model_fingerprint
from paceline.training.acceptance import ChainAcceptance, chain_starts
from paceline.training.data import Batch
from paceline.training.head import head_argmax, label_losses
from paceline.training.losses import linear_cross_entropy, linear_divergence
from paceline.training.objective import DrafterObjective, TargetReference
from paceline.training.token_rows import drawn

TARGET_DIR = "target"
"""Folder of the tuned target below the heads."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JointSettings:
    """How heads and target are trained together.

    Attributes:
        decay: weight of one head's loss over that of the head before; the first head has this weight once.
        coefficient: weight of all heads beside the base loss.
        schedule: of that weight over the joint stage: ``constant``, ``linear``, or ``sine`` (a quarter of a wave).
        heads_first: fraction of the run that trains the heads alone, on the stored hidden states.
        base_loss: ``kl`` keeps the target near the original's distribution, ``ce`` near the text.
        base_rows: rows of a batch whose base loss is computed, chosen at random; 0 takes all.
        max_loss_increase: nats a token by which the tuned target's held-out loss may exceed the original's.
    """

    decay: float = 0.8
    coefficient: float = 0.2
    schedule: str = "constant"
    heads_first: float = 0.3
    base_loss: str = "kl"
    base_rows: int = 0
    max_loss_increase: float = 0.05

    def weight(self, fraction: float) -> float:
        """Weight of the heads at a fraction of the run; 0 before the joint stage begins."""
        if fraction < self.heads_first:
            return 0.0
        joint = (fraction - self.heads_first) / (1.0 - self.heads_first)
        shape = {"constant": 1.0, "linear": joint, "sine": math.sin(math.pi / 2 * joint)}
        return self.coefficient * shape[self.schedule]


@dataclass(slots=True)
class LossComparison:
    """Held-out loss of the original target and of the tuned one, summed over answer tokens, in nats."""

    original: float = 0.0
    tuned: float = 0.0
    num_tokens: int = 0

    def add(self, original: Tensor, tuned: Tensor) -> None:
        """Count the losses of some tokens, float32 ``[n]`` each."""
        self.original += float(original.double().sum())
        self.tuned += float(tuned.double().sum())
        self.num_tokens += int(original.numel())

    @property
    def means(self) -> tuple[float, float]:
        """Nats a token: the original's, the tuned one's."""
        count = max(self.num_tokens, 1)
        return self.original / count, self.tuned / count


class Medusa2Objective(DrafterObjective):
    """Loss and acceptance of heads and the target that is tuned beside them.

    Args:
        heads: the heads.
        backbone: the target with its updates.
        target: the original target.
        settings: of the joint loss.
    """

    method = "medusa2"

    def __init__(
        self, heads: HeadStack, backbone: TunedBackbone, target: TargetReference, settings: JointSettings
    ) -> None:
        super().__init__({**heads.parameters, **backbone.parameters}, heads.dtype)
        self.heads = heads
        self.backbone = backbone
        self.target = target
        self.settings = settings
        self._fraction = 0.0
        self._forget()

    def _forget(self) -> None:
        self._ranks = RankCounts(self.heads.shape.num_heads)
        self._losses = LossComparison()

    def constants(self) -> dict[str, Tensor]:
        """The draft vocabulary, counted on the text."""
        return {"draft_ids": self.heads.draft_ids}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Fixes the draft vocabulary."""
        self.heads.set_draft_ids(constants["draft_ids"])

    def set_progress(self, fraction: float) -> None:
        """The heads alone first: an untrained head's gradient would only harm the target."""
        self._fraction = fraction

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """``base + coefficient * s(t) * sum_i decay^i CE(head i)``, ``i`` from 1; the heads' own loss at first."""
        self._forget()  # earlier measurements belong to older weights
        dtype, settings = self.heads.dtype, self.settings
        original = batch.need_hidden().to(dtype)
        if self._fraction < settings.heads_first:
            loss, metrics = self.heads.loss(original, batch, settings.decay)
        else:
            hidden = self.backbone.hidden(batch.tokens, is_training=True)
            base = self._base_loss(hidden, original, batch)
            of_heads, metrics = self.heads.loss(hidden, batch, settings.decay)
            loss = base + settings.weight(self._fraction) * settings.decay * of_heads
            metrics["base"] = float(base.detach())
        if not loss.requires_grad:  # a batch without a single label
            loss = loss + sum(p.sum() * 0.0 for p in self.heads.parameters.values())
        return loss, metrics

    def _base_loss(self, hidden: Tensor, original: Tensor, batch: Batch) -> Tensor:
        # Logits of the whole vocabulary are expensive, and doubly so with a teacher.
        row, position = drawn(_leads_to_answer(batch), self.settings.base_rows)
        if not row.numel():
            return hidden.sum() * 0.0
        head = self.backbone.head
        if self.settings.base_loss == "kl":
            return linear_divergence(hidden[row, position], head, original[row, position], head)
        return linear_cross_entropy(hidden[row, position], head, batch.tokens[row, position + 1])

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance by the tuned target, where it would have written the text's own next tokens.

        In serving, the tuned target verifies chains along its own text. This text is the original target's, so only
        passages count that both would write.
        """
        hidden = self.backbone.hidden(batch.tokens, is_training=False)
        rows, length = batch.tokens.shape
        head = self.backbone.head
        keep = _leads_to_answer(batch)
        labels = batch.tokens[:, 1:][keep[:, :-1]]
        self._losses.add(
            label_losses(batch.need_hidden().to(self.heads.dtype)[keep], head, labels),
            label_losses(hidden[keep], head, labels),
        )
        chosen = head_argmax(hidden.reshape(rows * length, -1), head).view(rows, length)
        is_written = torch.zeros_like(batch.is_answer)
        is_written[:, 1:] = chosen[:, :-1] == batch.tokens[:, 1:]
        usable = chain_starts(batch.is_greedy_answer & is_written, self.heads.shape.num_heads)
        if not usable.any():
            return ChainAcceptance()
        right = right_ranks(self.heads, hidden, chosen, usable)
        self._ranks.add(right)
        return ChainAcceptance.from_chains(right[:, :, 0])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the tuned target below ``folder`` and the heads made for it into ``folder``.

        Raises:
            ExportRefusedError: the tuned target's held-out loss is above the bound.
        """
        original, tuned = self._losses.means
        bound = original + self.settings.max_loss_increase
        log.info(
            "target_loss",
            original=round(original, 4),
            tuned=round(tuned, 4),
            bound=round(bound, 4),
            tokens=self._losses.num_tokens,
        )
        if not self._losses.num_tokens or tuned > bound:
            raise ExportRefusedError(
                f"the tuned target's held-out loss is {tuned:.4f} nats a token, the original's {original:.4f}: "
                f"more than {self.settings.max_loss_increase} worse"
            )
        target = folder / TARGET_DIR
        self.backbone.write(target)
        shape = {
            **asdict(self.heads.shape),
            "max_positions": self.target.max_positions,
            "accuracies": self._ranks.accuracies,
        }
        losses = {"original": round(original, 4), "tuned": round(tuned, 4), "bound": round(bound, 4)}
        facts = {
            **facts,
            "heldout_target_loss": losses,
            "original_fingerprint": self.target.fingerprint,
            "lora": asdict(self.backbone.settings),
        }
        config = DrafterConfig(
            self.method, model_fingerprint(target), f"{self.target.name}-{self.method}", shape, facts
        )
        save_drafter(folder, config, self.heads.tensors())


def _leads_to_answer(batch: Batch) -> Tensor:
    """Positions whose next token is part of an answer, bool ``[rows, length]``."""
    keep = torch.zeros_like(batch.is_answer)
    keep[:, :-1] = batch.is_answer[:, 1:]
    return keep
