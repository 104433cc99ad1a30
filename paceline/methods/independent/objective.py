"""An independent drafter cut from its target and distilled on the target's own text.

It has the first and last layers of the target, with the target's embedding, final norm and head. The loss is the cross
entropy against the target's distribution, which is the KL of distillation up to a constant; 2310.08461 explains why the
text should be the target's own. The drafter proposes the whole vocabulary or a part of it; embedding and head are
frozen. Called by :mod:`paceline.training.trainer`. Serving runs the exported model in
:mod:`paceline.methods.independent.drafter`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.atomic_write import write_json
from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.whole_model.cut_model import cut_model, split_shared
from paceline.methods.whole_model.draft_model import MODEL_DIR
from paceline.safetensors_io import write_weights
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance
from paceline.training.backbone import Backbone
from paceline.training.data import Batch
from paceline.training.draft_vocabulary import id_offsets
from paceline.training.head import head_argmax, softmax_head
from paceline.training.losses import linear_soft_cross_entropy
from paceline.training.objective import DrafterObjective, TargetReference
from paceline.training.target_weights import EMBEDDING, HEAD


class IndependentObjective(DrafterObjective):
    """Distillation loss and acceptance of a small model with the target's embedding and head.

    Args:
        config: the small model's transformers configuration.
        weights: its tensors by transformers names, embedding included.
        target: what the exported checkpoint says of its target.
        dtype: compute type; parameters stay float32.
        draft_ids: the tokens it will propose, ascending, int64 ``[draft_vocab]``; None for all.
    """

    method = "independent"

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, Tensor],
        target: TargetReference,
        dtype: torch.dtype,
        draft_ids: Tensor | None = None,
    ) -> None:
        self._frozen, parameters = split_shared(weights)
        super().__init__(parameters, dtype)
        self.config, self.target = config, target
        self.shape = Backbone.from_config(config)
        self._embedding = weights[EMBEDDING].to(dtype)
        self._whole_head = weights.get(HEAD, weights[EMBEDDING])
        self.set_constants({} if draft_ids is None else {"draft_ids": draft_ids})

    @classmethod
    def cut_from_target(
        cls,
        model_dir: Path,
        num_layers: int,
        target: TargetReference,
        dtype: torch.dtype,
        draft_ids: Tensor | None = None,
    ) -> IndependentObjective:
        """Starts from layers of the target itself."""
        return cls(*cut_model(model_dir, num_layers), target, dtype, draft_ids)

    def constants(self) -> dict[str, Tensor]:
        """The draft vocabulary, chosen on the text; nothing where it is whole."""
        return {} if self.draft_ids is None else {"draft_ids": self.draft_ids}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Fixes the draft vocabulary."""
        self.draft_ids = constants.get("draft_ids")
        ids = torch.arange(self.shape.vocab) if self.draft_ids is None else self.draft_ids
        self._head = self._whole_head.to(self.dtype)[ids]  # [draft_vocab, hidden]
        self._can_draft = torch.zeros(self.shape.vocab, dtype=torch.bool).index_fill(0, ids, True)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean cross entropy against the target's distribution, over positions before an answer token.

        With a part of the vocabulary, the distribution is the target's over that part, and only positions count whose
        best token is in it (as in EAGLE-3, 2503.01840, section 3).
        """
        hidden = batch.need_hidden()
        keep = torch.zeros_like(batch.is_answer)
        keep[:, :-1] = batch.is_answer[:, 1:]
        if self.draft_ids is not None:
            keep &= (batch.top_tokens >= 0) & self._can_draft[batch.top_tokens.clamp_min(0)]
        out = self._forward(batch.tokens)
        if not keep.any():
            return out.sum() * 0.0, {}
        target_probs = softmax_head(hidden[keep].to(self.dtype), self._head)
        value = linear_soft_cross_entropy(out[keep], self._head, target_probs)
        return value, {"loss": float(value.detach())}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains. After accepted tokens the drafter reads the text itself, so one pass is
        enough."""
        rows, length = batch.tokens.shape
        best = head_argmax(self._forward(batch.tokens).reshape(rows * length, -1), self._head)
        if self.draft_ids is not None:
            best = self.draft_ids[best]
        right = best.view(rows, length) == batch.top_tokens
        wanted = torch.zeros_like(right)
        wanted[:, :-1] = batch.is_answer[:, 1:] & batch.is_greedy[:, None]
        if length < EVAL_CHAIN:
            return ChainAcceptance()
        usable = wanted.unfold(1, EVAL_CHAIN, 1).all(-1)
        return ChainAcceptance.from_chains(right.unfold(1, EVAL_CHAIN, 1)[usable])

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the drafter's ``config.json`` and the small model as a transformers directory below it.

        The model is whole; ``d2t`` beside it says which rows of its head propose tokens.
        """
        model = folder / MODEL_DIR
        tensors = {**self._frozen, **self._parameters}
        write_weights(model / "model.safetensors", {k: v.detach().bfloat16() for k, v in tensors.items()})
        write_json(model / "config.json", {**self.config, "dtype": "bfloat16"})
        shape = {"target_vocab": self.shape.vocab, "num_layers": self.shape.num_layers}
        if self.draft_ids is not None:
            shape["draft_vocab"] = len(self.draft_ids)
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        if self.draft_ids is not None:
            save_drafter(folder, config, {"d2t": id_offsets(self.draft_ids)})
            return
        write_json(folder / "config.json", asdict(config))

    def _forward(self, tokens: Tensor) -> Tensor:
        """Final-norm hidden ``[rows, length, hidden]``."""
        return self.shape.final_hidden(self.compute_weights(), self._embedding, tokens)

    def compute_weights(self) -> dict[str, Tensor]:
        """Parameters in the compute type, but for norms."""
        return self.shape.compute_weights(self._parameters, self.dtype)
