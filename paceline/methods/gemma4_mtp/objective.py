"""Gemma 4's assistant trained for a finished target, on the target's keys and values.

How the published assistants were trained is not known; this objective is Paceline's own and follows serving. Row ``r``
is the beginning of a draft from the text up to token ``r + 1``. Its position is ``r + 1`` in all steps. It sees the
target's keys and values of positions up to ``r``, or of their window in a sliding layer. Step 0 reads token ``r + 1``
and the target's final-norm output of position ``r``. Step ``j`` reads token ``r + 1 + j`` and the output of step ``j -
1``, and proposes token ``r + 2 + j``. Rows do not see each other, so one pass a step covers all drafts of a text.

Responsible for the loss over steps, held-out acceptance and the clusters of the head; `unrolled.py` has the forward
pass. Knows no optimisers and no run checkpoints; called by :mod:`paceline.training.trainer`. Serving runs the same
weights in :mod:`paceline.methods.gemma4_mtp.drafter`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.gemma4_mtp.model import Gemma4MtpShape
from paceline.methods.gemma4_mtp.token_clusters import cluster_tokens, fit_centroids
from paceline.methods.gemma4_mtp.unrolled import UnrolledAssistant
from paceline.target import CachedLayer
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance, chain_hits
from paceline.training.data import Batch
from paceline.training.head import head_best
from paceline.training.losses import linear_cross_entropy, linear_divergence
from paceline.training.objective import DrafterObjective, TargetReference, checked_parameters
from paceline.training.target_rows import TargetRows
from paceline.training.token_rows import depth_loss, depth_weights

TABLE = "model.embed_tokens.weight"
_PRE, _POST = "pre_projection.weight", "post_projection.weight"
_STATES_PER_WIDTH = 4  # with fewer, a cluster's mean is the better centroid
_CENTROID_STATES = 6144  # newest states, of all steps, that centroids of a clustered head are fitted to


@dataclass(frozen=True, slots=True)
class TargetTables:
    """What the assistant shares with its target.

    Attributes:
        embedding: ``[vocab, backbone]``.
        embedding_scale: the target's factor on it.
        head: ``[vocab, backbone]``.
        rows: gives ``[final norm ; keys and values]`` of texts.
    """

    embedding: Tensor
    embedding_scale: float
    head: Tensor
    rows: TargetRows


class Gemma4MtpObjective(DrafterObjective):
    """Loss and acceptance of the assistant; the target is frozen.

    Args:
        shape: sizes, with a dense head: clusters are made when the drafter is exported.
        cached: the target's layer that each type of layer reads.
        parameters: float32 by checkpoint name; see :meth:`Gemma4MtpShape.parameter_shapes`.
        tables: the target's.
        target: what the exported checkpoint says of its target.
        input_scale: root mean square of each entry that `pre_projection` reads, ``[2 * backbone]``. A few entries of a
            state are far larger than the rest, and an optimiser's equal steps for all entries would swing the output.
            So both projections are trained in units of this scale, and exported in the target's own. None: a scale of
            1.
        steps: in the loss.
        step_decay: weight of a step over that of the step before.
        loss: ``ce`` on the text's tokens, or ``kl`` to the target's distributions.
        token_rows: rows of a batch and step whose loss is computed, chosen at random; 0 takes all.
        num_clusters: of the exported head; 0 leaves it dense.
        num_selected: clusters whose tokens it scores.
        dtype: compute type; parameters stay float32.
    """

    method = "gemma4_mtp"

    def __init__(
        self,
        shape: Gemma4MtpShape,
        cached: Mapping[str, CachedLayer],
        parameters: Mapping[str, Tensor],
        tables: TargetTables,
        target: TargetReference,
        input_scale: Tensor | None = None,
        steps: int = 3,
        step_decay: float = 0.8,
        loss: str = "ce",
        token_rows: int = 0,
        num_clusters: int = 0,
        num_selected: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(checked_parameters(self.method, shape.parameter_shapes(), parameters), dtype)
        self.shape, self.cached, self.target = shape, dict(cached), target
        scale = torch.ones(2 * shape.backbone) if input_scale is None else input_scale
        self.set_constants({"input_scale": scale})
        with torch.no_grad():
            self._parameters[_PRE].mul_(self._input_scale)
            self._parameters[_POST].div_(self._state_scale)
        self._embedding, self._head = tables.embedding.to(dtype), tables.head.to(dtype)
        self._embedding_scale, self._rows = tables.embedding_scale, tables.rows
        self._weights = depth_weights(steps, step_decay)
        self._loss, self._token_rows = loss, token_rows
        self._num_clusters, self._num_selected = num_clusters, num_selected
        self._seen: list[Tensor] = []  # what the head read recently, each [n, hidden]

    def constants(self) -> dict[str, Tensor]:
        """The scale of inputs, measured on the text."""
        return {"input_scale": self._input_scale}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Sets the scale of inputs."""
        self._input_scale = constants["input_scale"].float()
        self._state_scale = self._input_scale[self.shape.backbone :, None]

    def tensors(self) -> dict[str, Tensor]:
        """Float32 by checkpoint name, in the target's units."""
        return {
            **self._parameters,
            _PRE: self._parameters[_PRE] / self._input_scale,
            _POST: self._parameters[_POST] * self._state_scale,
        }

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted sum over steps of the mean loss of rows that propose an answer's token."""
        features = self._rows.read(batch).to(self.dtype)
        table = self._parameters[TABLE].to(self.dtype)

        def row_loss(states: Tensor, row: Tensor, place: Tensor) -> Tensor:
            if self._num_clusters:
                self._note(states.detach())
            if self._loss == "kl":
                wanted = features[row, place, : self.shape.backbone]
                return linear_divergence(states, table, wanted, self._head)
            return linear_cross_entropy(states, table, batch.tokens[row, place + 1])

        outputs = self.run(batch, features, len(self._weights))
        total, shown = depth_loss(batch, outputs, self._weights, self._token_rows, row_loss)
        return (total, shown) if shown else (self.zero_loss(), {})

    def _note(self, states: Tensor) -> None:
        """Keeps the newest states that the head read, as many as the clusters' centroids need."""
        self._seen.append(states)
        while sum(len(part) for part in self._seen[1:]) >= _CENTROID_STATES:
            del self._seen[0]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains with the dense head; see :func:`paceline.training.acceptance.chain_hits`."""
        table = self._parameters[TABLE].to(self.dtype)
        hits = chain_hits(batch, self.outputs(batch, EVAL_CHAIN), lambda states: head_best(states, table, 1))
        return ChainAcceptance.from_chains(hits[..., 0])

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """What the head reads at each step, ``[rows, length, hidden]``; reads the target's rows first."""
        yield from self.run(batch, self._rows.read(batch).to(self.dtype), steps)

    def run(self, batch: Batch, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As :meth:`outputs`.

        Args:
            batch: texts.
            features: ``[rows, length, width]``, the target's.
            steps: how many.
        """
        weights = {k: t.to(self.dtype) for k, t in self.tensors().items()}
        assistant = UnrolledAssistant(self.shape, self.cached, weights, features)
        return assistant.run(batch.tokens, self._embedding, self._embedding_scale, steps)

    def checkpoint(self, facts: Mapping[str, Any]) -> tuple[DrafterConfig, dict[str, Tensor]]:
        """The servable checkpoint in bfloat16; its head is clustered where the options ask for it."""
        tensors = {k: t.detach().bfloat16() for k, t in self.tensors().items()}
        shape = self.shape
        if self._num_clusters:
            shape = replace(shape, num_clusters=self._num_clusters, num_selected=self._num_selected)
            table = self._parameters[TABLE].detach()
            centroids, order = cluster_tokens(table, self._num_clusters)
            states = torch.cat([table[:0], *self._seen])[-_CENTROID_STATES:]
            if len(states) >= _STATES_PER_WIDTH * states.shape[1]:
                centroids = fit_centroids(states, table, order, self._num_clusters)
            tensors["masked_embedding.centroids.weight"] = centroids.bfloat16()
            tensors["masked_embedding.token_ordering"] = order
        content = {
            **{name: getattr(shape, name) for name in ("backbone", "hidden", "intermediate", "vocab")},
            **{name: getattr(shape, name) for name in ("num_heads", "sliding_window", "rms_eps")},
            **{name: getattr(shape, name) for name in ("num_clusters", "num_selected")},
            **{name: dict(getattr(shape, name)) for name in ("head_dims", "rope_thetas", "rotary_fractions")},
            "layer_types": list(shape.layer_types),
            "kv_heads": {kind: one.num_kv_heads for kind, one in self.cached.items()},
            "kv_layers": {kind: one.layer for kind, one in self.cached.items()},
            "embedding_scale": self._embedding_scale,
            "max_positions": self.target.max_positions,
        }
        return (
            DrafterConfig(self.method, self.target.fingerprint, self.target.name, content, dict(facts)),
            tensors,
        )

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        save_drafter(folder, *self.checkpoint(facts))
