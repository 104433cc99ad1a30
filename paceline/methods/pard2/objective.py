"""PARD-2's training objective: PARD's rows with features, weighted by the target's confidence (2605.08632).

Responsible for what PARD-2 adds to :mod:`paceline.methods.pard.objective`: features in the embeddings, left out for
randomly drawn texts, and the loss. Serving runs the exported checkpoint in :mod:`paceline.methods.pard2.drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.methods.one_pass.rows import FlatRows
from paceline.methods.pard.checkpoint import PROJECTION
from paceline.methods.pard.objective import PardObjective
from paceline.training.data import Batch, Corpus
from paceline.training.head import label_losses
from paceline.training.losses import linear_distillation
from paceline.training.objective import TargetReference
from paceline.training.start import answer_mean

SCALE = 0.02
"""Factor on features before they are added to embeddings; the authors' value."""


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """Settings of PARD-2 beside those of PARD.

    Attributes:
        drop: fraction of texts that are learned without features.
        label_weight: weight of the cross entropy on the text, beside the divergence from the target.
        scale: factor on features before they are added.
    """

    drop: float = 0.1
    label_weight: float = 0.1
    scale: float = SCALE


class Pard2Objective(PardObjective):
    """Loss and acceptance of PARD-2.

    Args:
        config: as for :class:`PardObjective`.
        weights: as for :class:`PardObjective`.
        target: the target that it learns from, with its tapped layers.
        target_head: the target's head ``[vocab, target_hidden]``, frozen.
        feature_scale: ``[width]``. Training divides taps and final states by it; the export folds it into the
            projection.
        settings: settings of PARD-2 beside those of PARD.
        seed: of the projection's start.
        options: the others of :class:`PardObjective`, by name.
    """

    method = "pard2"

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        target: TargetReference,
        target_head: Tensor,
        feature_scale: Tensor,
        settings: FeatureSettings,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self._feature_scale = feature_scale.float()
        self._teacher_whole = target_head
        self.settings = settings
        super().__init__(config, weights, target, **options)
        random = torch.Generator().manual_seed(seed)
        width = feature_scale.shape[0]
        start = torch.randn(self.shape.hidden, width, generator=random) * width**-0.5
        self._parameters[PROJECTION] = nn.Parameter(start)

    def constants(self) -> dict[str, Tensor]:
        """PARD's constants, and the features' scale, measured on the text."""
        return {**super().constants(), "feature_scale": self._feature_scale}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores them."""
        super().set_constants(constants)
        self._feature_scale = constants.get("feature_scale", self._feature_scale).float()
        # [draft_vocab, target_hidden]
        self._teacher_head = self._teacher_whole.to(self.dtype)[self.draft_ids]

    def predicts(self, batch: Batch) -> Tensor:
        """Positions whose row has a label: the next token is an answer's."""
        return F.pad(batch.is_answer[:, 1:], (0, 1))

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """``label_weight`` times cross entropy on the text plus divergence from the target, both weighted; section 5.

        The teacher at a row's position has read the whole text before it, the student only the text up to its anchor.
        """
        hidden = batch.need_hidden()
        rows = self.sample(batch)
        w = self.compute_weights()
        out = self.forward(w, self.gated(batch), rows)
        text, row, labels = self.labelled(batch, rows)
        if not text.numel():
            return out.sum() * 0.0, {}
        x = out[text, row]
        weights = self.confidence_weights(batch, rows)[text, row]
        teacher = hidden[text, rows.positions[text, row]].to(self.dtype)
        value, ce, kd = linear_distillation(
            x, self._head, labels, self.settings.label_weight, teacher, self._teacher_head, weights
        )
        shown = {"loss": value, "ce": ce, "kd": kd, "weight": weights.mean()}
        return value, {name: float(number.detach()) for name, number in shown.items()}

    def gated(self, batch: Batch) -> Batch:
        """The texts, with the features of randomly drawn texts set to zero."""
        gate = (torch.rand(batch.tokens.shape[0]) >= self.settings.drop)[:, None, None]
        return replace(batch, taps=batch.need_taps() * gate, hidden=batch.need_hidden() * gate)

    @torch.no_grad()
    def confidence_weights(self, batch: Batch, rows: FlatRows) -> Tensor:
        """Confidence-adaptive token weights, float32 ``[texts, n]``.

        A row's weight is the target's probability of the text's own tokens between the anchor and the row's label, both
        excluded: approximately the probability that verification reaches the label. 1 at depth 0.
        """
        # Whole chains are kept, so mask rows have the positions of all these tokens.
        needed = torch.zeros_like(batch.is_answer)
        text, row = (rows.depths > 0).nonzero(as_tuple=True)
        needed[text, rows.positions[text, row]] = True
        text, place = needed.nonzero(as_tuple=True)
        before = batch.need_hidden()[text, place - 1].to(self.dtype)
        losses = label_losses(before, self._teacher_whole.to(self.dtype), batch.tokens[text, place])
        log_prob = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        log_prob[text, place] = -losses.double()
        log_prob = log_prob.cumsum(1)  # [texts, length]: of a position's token and all needed before it
        weights: Tensor = (log_prob.gather(1, rows.positions) - log_prob.gather(1, rows.anchors)).exp()
        return weights.float()

    def fuse(self, w: dict[str, Tensor], batch: Batch, rows: FlatRows, x: Tensor) -> Tensor:
        """Embeddings plus features of the state that predicted the row's last known token; zeros for the first
        token."""
        features = _features(batch).to(self.dtype) / self._feature_scale.to(self.dtype)
        # Token i reads position i - 1.
        projected = F.pad(F.linear(features, w[PROJECTION])[:, :-1], (0, 0, 1, 0))
        return x + self.settings.scale * projected.gather(
            1, rows.anchors[..., None].expand(-1, -1, x.shape[-1])
        )

    def fingerprint(self) -> str:
        """The target whose features it reads."""
        return self.target.fingerprint

    def export_shape(self) -> dict[str, Any]:
        """The method's sizes in the checkpoint."""
        return {
            **super().export_shape(),
            "tap_layers": list(self.target.tap_layers),
            "norm_final": True,
            "target_hidden": int(self._teacher_whole.shape[1]),
            "scale": self.settings.scale,
            "proj_bias": False,
        }

    def export_tensors(self) -> dict[str, Tensor]:
        """The projection, for unscaled features."""
        weight = self._parameters[PROJECTION].detach() / self._feature_scale
        return {PROJECTION: weight.bfloat16()}

    def public_fields(self) -> dict[str, Any]:
        """Fields of the model's own configuration. Without the features, which are beside it, the model is PARD's."""
        return {**super().public_fields(), "spd_type": "pard"}


def rms_features(corpus: Corpus) -> Tensor:
    """Root mean square of taps and final states over answers, float32 ``[width]``.

    Raises:
        TrainingDataError: there are no features, or no answers.
    """
    mean = answer_mean(corpus, lambda batch: _features(batch).float().square())
    return mean.sqrt().clamp_min(1e-6)


def _features(batch: Batch) -> Tensor:
    """Taps beside final states, ``[texts, length, width]``."""
    return torch.cat([batch.need_taps(), batch.need_hidden()], dim=-1)
