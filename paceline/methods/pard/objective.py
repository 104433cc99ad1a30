"""PARD's training objective: a small causal language model learns all depths of a draft in one pass (2504.18583).

Responsible for the forward pass over true and mask rows, the loss and held-out acceptance. Knows no optimisers, run
checkpoints or serving; called by :mod:`paceline.training.trainer`. Serving runs the exported model in
:mod:`paceline.methods.pard.drafter`; a test compares the two.

Row ``(anchor, depth)`` has position ``r = anchor + depth`` and predicts token ``r + 1``. At depth 0 it reads token
``r``. Deeper rows read the mask token and see nothing after their anchor. The rows and who sees whom are the same as in
P-EAGLE (:mod:`paceline.methods.one_pass.rows`), which took both from PARD. Rows are drawn for each text alone.

Embedding and head are those of the starting model and frozen, except for the mask token's row of the embedding. The
mask token is never drafted and is in no softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.methods.checkpoint import ANY_TARGET, DrafterConfig
from paceline.methods.one_pass.acceptance import one_pass_acceptance
from paceline.methods.one_pass.rows import FlatRows, sample_rows
from paceline.methods.pard.checkpoint import MODEL_CONFIG, save_pard
from paceline.methods.whole_model.cut_model import split_shared
from paceline.training.acceptance import ChainAcceptance
from paceline.training.backbone import Backbone
from paceline.training.data import Batch
from paceline.training.draft_vocabulary import draft_ids_of, id_offsets
from paceline.training.head import head_argmax
from paceline.training.losses import linear_cross_entropy
from paceline.training.objective import DrafterObjective, TargetReference
from paceline.training.target_weights import EMBEDDING, HEAD

MASK = "mask_row"
"""Name of the parameter that becomes the mask token's row of the embedding."""


class PardObjective(DrafterObjective):
    """Loss and acceptance of a causal language model with mask rows.

    Args:
        config: the small model's transformers configuration.
        weights: its tensors by transformers names, embedding included.
        target: what the exported checkpoint says of the target that wrote the text.
        mask_token: id whose embedding row is learned.
        draft_ids: the tokens it will propose, ascending, int64 ``[draft_vocab]``; None for all but the mask token.
        num_depths: depths trained.
        keep_ratio: rows kept at each depth over those of the depth before.
        keep_floor: least fraction of rows at any depth.
        dtype: compute type; parameters stay float32.
        tokenizer_dir: the target, whose tokenizer the export copies.
    """

    method: str

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        target: TargetReference,
        mask_token: int,
        draft_ids: Tensor | None,
        num_depths: int,
        keep_ratio: float = 0.7,
        keep_floor: float = 0.2,
        dtype: torch.dtype = torch.bfloat16,
        tokenizer_dir: Path | None = None,
    ) -> None:
        self._frozen, parameters = split_shared(weights)
        embedding = weights[EMBEDDING]
        # A typical row: what the model reads where it can know nothing.
        parameters[MASK] = nn.Parameter(embedding.float().mean(0))
        super().__init__(parameters, dtype)
        self.config, self.target = dict(config), target
        self.shape = Backbone.from_config(self.config)
        self.mask_token = mask_token
        self.num_depths = num_depths
        self.keep_ratio = keep_ratio
        self.keep_floor = keep_floor
        self._tokenizer_dir = tokenizer_dir
        self._embedding = embedding.to(dtype)
        self._whole_head = weights.get(HEAD, embedding)
        self._is_reduced = draft_ids is not None
        every = torch.arange(self.shape.vocab) if draft_ids is None else draft_ids
        self.set_constants({"draft_ids": every[every != mask_token]})

    def constants(self) -> dict[str, Tensor]:
        """The draft vocabulary and the mask token, both chosen on the text."""
        return {"draft_ids": self.draft_ids, "mask_token": torch.tensor(self.mask_token)}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Fixes the draft vocabulary and the mask token."""
        self.draft_ids = constants["draft_ids"]
        self.mask_token = int(constants.get("mask_token", self.mask_token))
        self._head = self._whole_head.to(self.dtype)[self.draft_ids]  # [draft_vocab, hidden]
        self._draft_of = draft_ids_of(self.draft_ids, self.shape.vocab)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean cross entropy of all kept rows on the text, prompts included, as in the authors' recipe."""
        rows = self.sample(batch)
        out = self.forward(self.compute_weights(), batch, rows)
        text, row, labels = self.labelled(batch, rows)
        if not text.numel():
            return out.sum() * 0.0, {}
        value = linear_cross_entropy(out[text, row], self._head, labels)
        return value, {"loss": float(value.detach())}

    def predicts(self, batch: Batch) -> Tensor:
        """Positions whose row has a label, the next token: bool ``[texts, length]``."""
        return torch.arange(1, batch.tokens.shape[1] + 1)[None] < batch.lengths[:, None]

    def sample(self, batch: Batch) -> FlatRows:
        """Rows of each text, drawn for this call."""
        predicts = self.predicts(batch)
        parts = [
            sample_rows(predicts[i, :length], self.num_depths, self.keep_ratio, self.keep_floor)
            for i, length in enumerate(batch.lengths.tolist())
        ]
        return FlatRows.pad(parts, [torch.ones(p.shape[1], dtype=torch.bool) for p in parts])

    def labelled(self, batch: Batch, rows: FlatRows) -> tuple[Tensor, Tensor, Tensor]:
        """Rows whose label can be drafted: text, row and draft id of the label, int64 each."""
        after = self._draft_of[F.pad(batch.tokens[:, 1:], (0, 1))]
        after = after.where(self.predicts(batch), -1).gather(1, rows.positions)
        text, row = (rows.is_own & (after >= 0)).nonzero(as_tuple=True)
        return text, row, after[text, row]

    def compute_weights(self) -> dict[str, Tensor]:
        """Parameters in the compute type, but for norms."""
        return self.shape.compute_weights(self._parameters, self.dtype)

    def forward(self, w: dict[str, Tensor], batch: Batch, rows: FlatRows) -> Tensor:
        """The final-norm output of every row, ``[texts, n, hidden]``.

        Args:
            w: parameters, as :meth:`compute_weights` gives them.
            batch: texts.
            rows: rows of each text.
        """
        ids = batch.tokens.gather(1, rows.anchors)
        is_mask = (rows.depths > 0) | (ids == self.mask_token)
        x = torch.where(is_mask[..., None], w[MASK], F.embedding(ids, self._embedding))
        x = self.fuse(w, batch, rows, self.shape.scaled(x))
        rotations = self.shape.rotations(int(rows.positions.max()) + 1, self.dtype)
        at = {key: (cos[rows.positions], sin[rows.positions]) for key, (cos, sin) in rotations.items()}
        patterns = {window: rows.pattern(self.dtype, window) for window in self.shape.windows}
        return self.shape.run_layers(w, x, at, patterns)

    def fuse(self, w: dict[str, Tensor], batch: Batch, rows: FlatRows, x: Tensor) -> Tensor:
        """What the layers read: here only the embeddings ``x`` ``[texts, n, hidden]``."""
        return x

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains; see :func:`paceline.methods.one_pass.acceptance.one_pass_acceptance`."""
        weights = self.compute_weights()

        def forward(part: Batch, rows: FlatRows) -> Tensor:
            return self.forward(weights, part, rows)

        def best(states: Tensor) -> Tensor:
            return self.draft_ids[head_argmax(states, self._head)]

        return one_pass_acceptance(batch, self.num_depths, 1, forward, best)

    def model_tensors(self) -> dict[str, Tensor]:
        """The servable model by transformers names, bfloat16."""
        tensors = {k: p.detach() for k, p in self._parameters.items() if k.startswith("model.")}
        tensors |= self._frozen
        embedding = self._frozen[EMBEDDING].clone()
        embedding[self.mask_token] = self._parameters[MASK].detach().to(embedding.dtype)
        if not self.config.get("tie_word_embeddings", False) and HEAD not in tensors:
            raise TrainingDataError(
                "the model has no head, and its configuration does not share the embedding"
            )
        tensors[EMBEDDING] = embedding
        return {k: v.bfloat16() for k, v in tensors.items()}

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes the drafter's ``config.json``, and the model as ``model/`` below it, which other engines can serve."""
        shape = {**self.export_shape(), MODEL_CONFIG: {**self.config, **self.public_fields()}}
        tensors = {**self.model_tensors(), **self.export_tensors()}
        if self._is_reduced:
            shape["draft_vocab"] = len(self.draft_ids)
            tensors["d2t"] = id_offsets(self.draft_ids)
        config = DrafterConfig(self.method, self.fingerprint(), self.target.name, shape, facts)
        save_pard(folder, config, tensors, self._tokenizer_dir)

    def fingerprint(self) -> str:
        """The target that the checkpoint is for: any target with the same tokenizer."""
        return ANY_TARGET

    def export_shape(self) -> dict[str, Any]:
        """The method's sizes in the checkpoint."""
        return {
            "mask_token": self.mask_token,
            "num_depths": self.num_depths,
            "num_layers": self.shape.num_layers,
        }

    def export_tensors(self) -> dict[str, Tensor]:
        """Tensors beside the model."""
        return {}

    def public_fields(self) -> dict[str, Any]:
        """Fields of the model's own configuration."""
        return {"dtype": "bfloat16", "pard_token": self.mask_token, "spd_type": "pard"}
