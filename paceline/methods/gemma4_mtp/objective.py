"""Gemma 4's assistant trained behind a finished target: it learns over the target's keys and values.

How the published ones were trained is not known; this objective is Paceline's own, after what serving does. Row ``r``
is the beginning of a draft from the text up to token ``r + 1``: it stands at position ``r + 1`` throughout, sees the
target's keys and values of positions up to ``r`` (a sliding layer those of its window), and reads token ``r + 1`` and
the target's final-norm output of position ``r``. Step ``j`` reads token ``r + 1 + j`` and what step ``j - 1`` gave, and
proposes token ``r + 2 + j``. Rows do not see one another, so that all drafts of a text are one pass a step.

Responsible for the loss over steps, held-out acceptance and the clusters of the head. Knows nothing of optimisers and
checkpoints of runs; called by :mod:`paceline.training.trainer`. Serving runs the same model through
:mod:`paceline.methods.gemma4_mtp.drafter`, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.gemma4_mtp.model import SLIDING, Gemma4MtpShape, rotary_frequencies
from paceline.methods.gemma4_mtp.token_clusters import cluster_tokens, fit_centroids
from paceline.model.block import BlockShape
from paceline.target import CachedLayer
from paceline.training.acceptance import EVAL_CHAIN, AcceptanceCounts, chain_hits
from paceline.training.block import DifferentiableBlock, Rotation, rms_norm
from paceline.training.data import Batch
from paceline.training.head import head_best
from paceline.training.losses import linear_cross_entropy, linear_divergence
from paceline.training.objective import DrafterObjective, TargetReference, checked_parameters
from paceline.training.target_rows import TargetRows
from paceline.training.token_rows import depth_loss, depth_weights

TABLE = "model.embed_tokens.weight"
_PRE, _POST = "pre_projection.weight", "post_projection.weight"
_STATES_PER_WIDTH = 4  # with fewer, a cluster's mean foretells more
_CENTROID_STATES = (
    6144  # of all steps, that the centroids of a clustered head are fitted to; the newest of a run
)


@dataclass(frozen=True, slots=True)
class TargetTables:
    """What the assistant shares with its target.

    Attributes:
        embedding: ``[vocab, backbone]``.
        embedding_scale: what the target multiplies it by.
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
        cached: what is read of the target, by type of layer.
        parameters: float32 by checkpoint name; see :meth:`Gemma4MtpShape.parameter_shapes`.
        tables: the target's.
        target: what the exported checkpoint says of its target.
        input_scale: root mean square of each entry that `pre_projection` reads, ``[2 * backbone]``. A few entries of a
            state are far larger than the rest; both projections are trained in units of these and exported in the
            target's own, else the optimiser's equal steps for all entries would swing the output. None: as they are.
        steps: in the loss.
        step_decay: weight of a step, of the one before.
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
        self._seen: list[Tensor] = []  # what the head read of late, each [n, hidden]

    def constants(self) -> dict[str, Tensor]:
        """The scale of what is read, measured on the text."""
        return {"input_scale": self._input_scale}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Fixes it."""
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
        """Weighted sum over steps of the mean over rows whose proposal is part of an answer."""
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
        """Keep what the head read, for the clusters' centroids; of the newest as many as are needed."""
        self._seen.append(states)
        while sum(len(part) for part in self._seen[1:]) >= _CENTROID_STATES:
            del self._seen[0]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> AcceptanceCounts:
        """Greedy acceptance of chains with the dense head; see :func:`paceline.training.acceptance.chain_hits`."""
        table = self._parameters[TABLE].to(self.dtype)
        hits = chain_hits(batch, self.outputs(batch, EVAL_CHAIN), lambda states: head_best(states, table, 1))
        return AcceptanceCounts.from_chains(hits[..., 0])

    def outputs(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """What the head reads at each step, ``[rows, length, hidden]``; with the target's rows read for it."""
        yield from self.run(batch, self._rows.read(batch).to(self.dtype), steps)

    def run(self, batch: Batch, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As :meth:`outputs`.

        Args:
            batch: texts.
            features: ``[rows, length, width]``, the target's.
            steps: how many.
        """
        w = {k: t.to(self.dtype) for k, t in self.tensors().items()}
        length = batch.tokens.shape[1]
        widths = [self.shape.backbone, *(one.width for one in self.cached.values())]
        state, *columns = features.split(widths, dim=-1)
        caches = {
            kind: column.unflatten(-1, (2 * one.num_kv_heads, one.head_dim)).transpose(1, 2)
            for (kind, one), column in zip(self.cached.items(), columns, strict=True)
        }  # each [rows, 2 * kv_heads, length, head_dim], keys first
        masks = {kind: self._mask(kind, length) for kind in caches}
        rotations = {kind: self._rotation(kind, length) for kind in caches}
        layers = [
            (kind, DifferentiableBlock(self._block_shape(kind), w, f"model.layers.{index}."))
            for index, kind in enumerate(self.shape.layer_types)
        ]
        ids = batch.tokens
        for _ in range(steps):
            ids = F.pad(ids[:, 1:], (0, 1))
            embedded = F.embedding(ids, self._embedding) * self._embedding_scale
            stream = F.linear(torch.cat([embedded, state], dim=-1), w[_PRE])
            for index, (kind, layer) in enumerate(layers):
                queries = layer.heads("q", layer.norm("input_layernorm", stream), rotations[kind])
                mixed = attend_cache(queries, caches[kind], masks[kind])
                stream = layer.add_branches(stream, mixed) * w[f"model.layers.{index}.layer_scalar"]
            output = rms_norm(stream, w["model.norm.weight"], self.shape.rms_eps)
            state = F.linear(output, w[_POST])
            yield output

    def _block_shape(self, kind: str) -> BlockShape:
        """A layer of a kind; its keys and values are the target's."""
        shape = self.shape
        return BlockShape(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_heads=shape.num_heads,
            num_kv_heads=self.cached[kind].num_kv_heads,
            head_dim=shape.head_dims[kind],
            norm_eps=shape.rms_eps,
            attention_scale=1.0,
            activation="gelu_pytorch_tanh",
            has_qk_norm=True,
            has_sandwich_norms=True,
        )

    def _rotation(self, kind: str, length: int) -> Rotation:
        """Of rows ``0 .. length - 1``, which stand at the positions after theirs: ``[length, 1, head_dim]`` each."""
        shape = self.shape
        frequencies = rotary_frequencies(
            shape.head_dims[kind], shape.rope_thetas[kind], shape.rotary_fractions[kind]
        )
        angles = torch.arange(1, length + 1)[:, None, None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _mask(self, kind: str, length: int) -> Tensor:
        """Additive ``[length, length]``: who sees which positions."""
        place = torch.arange(length)
        behind = place[:, None] - place[None]
        seen = behind >= 0
        if kind == SLIDING:
            seen &= behind <= self.shape.sliding_window
        return torch.zeros(length, length, dtype=self.dtype).masked_fill_(~seen, -torch.inf)

    def checkpoint(self, facts: Mapping[str, Any]) -> tuple[DrafterConfig, dict[str, Tensor]]:
        """The servable checkpoint in bfloat16, its head in clusters where they were asked for."""
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


def attend_cache(queries: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
    """Attention to the target's keys and values, ``[texts, rows, heads * head_dim]``.

    Args:
        queries: ``[texts, rows, heads, head_dim]``, scaled.
        cache: ``[texts, 2 * kv_heads, length, head_dim]``, keys first.
        mask: additive, ``[rows, length]``.
    """
    keys, values = cache.chunk(2, dim=1)
    groups = queries.shape[2] // keys.shape[1]
    # [texts, kv_heads, groups * rows, head_dim]: query heads of a key head one behind the other
    folded = queries.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask.repeat(groups, 1), scale=1.0)
    by_row: Tensor = mixed.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4)
    return by_row.flatten(2)
