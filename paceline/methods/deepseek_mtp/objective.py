"""Multi-token prediction trained for a finished target: modules learn the text that the target wrote.

Responsible for the loss over depths (DeepSeek-V3, 2412.19437, section 2.2; for one module run again on its own output,
with falling weights: FastMTP, 2509.18362) and for held-out acceptance. Embedding and head are the target's and frozen.
Knows no optimisers, run checkpoints or serving; called by :mod:`paceline.training.trainer`. Modules trained together
with their target: :mod:`paceline.methods.deepseek_mtp.joint`. Serving runs the same weights in
:mod:`paceline.methods.deepseek_mtp.drafter`; a test compares the two.

Row ``r`` at depth ``j`` joins the state of that row from the depth before with token ``r + 1 + j``, and proposes token
``r + 2 + j``. At depth 0 the state is the target's final hidden state of position ``r``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.methods.checkpoint import DrafterConfig, save_drafter
from paceline.methods.decoder_block import block_shape
from paceline.methods.deepseek_mtp.layer import module_prefix, parameter_shapes
from paceline.methods.shared_head import SharedHead
from paceline.model.block import BlockShape
from paceline.model.experts import ExpertsShape
from paceline.model.latent import LatentShape
from paceline.training.acceptance import EVAL_CHAIN, ChainAcceptance, chain_hits
from paceline.training.block import DifferentiableBlock
from paceline.training.data import Batch
from paceline.training.losses import head_distillation, linear_cross_entropy
from paceline.training.objective import DrafterObjective, TargetReference, checked_parameters
from paceline.training.sizes import DrafterSizes
from paceline.training.token_rows import depth_loss, depth_weights
from paceline.training.unroll import UnrolledBlock


@dataclass(frozen=True, slots=True)
class MtpShape(DrafterSizes):
    """Sizes of the modules; they are as wide as their target, and their blocks are like the target's.

    Attributes:
        target_layers: layers of the target, by which public names count.
        num_modules: modules in sequence.
        carries_norm: whether a module hands on its output after its last norm, or before it.
        latent: sizes of latent attention; None for ordinary heads.
        experts: sizes of routed experts, or None. ``intermediate`` is then that of the shared experts, 0 for none.
    """

    target_layers: int
    num_modules: int = 1
    carries_norm: bool = True
    latent: LatentShape | None = None
    experts: ExpertsShape | None = None

    def fields(self) -> dict[str, Any]:
        """Fields of a checkpoint's ``shape``, without those that say nothing."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Trained tensors by checkpoint name."""
        return parameter_shapes(DrafterConfig("deepseek_mtp", "", shape=self.fields()))

    def block(self) -> BlockShape:
        """The modules' block, as serving reads it from a checkpoint."""
        return block_shape(DrafterConfig("deepseek_mtp", "", shape=self.fields()))


def run_depths(
    shape: MtpShape,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    features: Tensor,
    embedding: Tensor,
    steps: int,
) -> Iterator[Tensor]:
    """Yields what the head reads at each depth, ``[rows, length, hidden]``.

    Modules run one after the other. After the last the first runs again, on the last one's output; it then also sees
    its own rows of earlier runs.

    Args:
        shape: sizes.
        weights: by checkpoint name, in the type to compute in.
        tokens: int64 ``[rows, length]``, right-padded.
        features: ``[rows, length, hidden]``, the target's.
        embedding: ``[vocab, hidden]``.
        steps: how many depths.
    """
    modules = [
        DifferentiableBlock(shape.block(), weights, module_prefix(m))
        for m in range(min(steps, shape.num_modules))
    ]
    blocks = [UnrolledBlock(m, shape.rope_theta, tokens.shape[1], features.dtype) for m in modules]
    ids, state = tokens, features
    for j in range(steps):
        at = j % shape.num_modules
        module = modules[at]
        ids = F.pad(ids[:, 1:], (0, 1))
        embedded = module.norm("enorm", F.embedding(ids, embedding))
        joined = torch.cat([embedded, module.norm("hnorm", state)], dim=-1)
        entered = F.linear(joined, weights[module_prefix(at) + "eh_proj.weight"])
        raw = blocks[at].step(module.norm("input_layernorm", entered), entered, j - at)
        normed = module.norm("shared_head.norm", raw)
        state = normed if shape.carries_norm else raw
        yield normed


class DeepseekMtpObjective(DrafterObjective):
    """Loss and acceptance of the modules; the target is frozen.

    Args:
        shape: sizes.
        parameters: float32 parameters by checkpoint name; see :meth:`MtpShape.parameter_shapes`.
        embedding: the target's token embedding ``[target_vocab, hidden]``.
        head: the target's head ``[target_vocab, hidden]``.
        target: what the exported checkpoint says of its target.
        steps: depths in the loss; at least one for each module.
        step_decay: weight of a depth over that of the depth before.
        loss: ``ce`` on the text's tokens, as published, or ``kl`` to the target's distributions.
        token_rows: rows of a batch and depth whose loss is computed, chosen at random; 0 takes all.
        draft_ids: the target's id of every token that is proposed in evaluation and serving, ascending, int64
            ``[draft_vocab]``; None for all.
        dtype: compute type; parameters stay float32.
    """

    method = "deepseek_mtp"

    def __init__(
        self,
        shape: MtpShape,
        parameters: dict[str, Tensor],
        embedding: Tensor,
        head: Tensor,
        target: TargetReference,
        steps: int = 3,
        step_decay: float = 0.6,
        loss: str = "ce",
        token_rows: int = 0,
        draft_ids: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(checked_parameters(self.method, shape.parameter_shapes(), parameters), dtype)
        self.shape, self.target = shape, target
        self._depth_weights = depth_weights(max(steps, shape.num_modules), step_decay)
        self._loss, self._token_rows = loss, token_rows
        self._embedding = embedding.to(dtype)
        self._head = SharedHead(head, draft_ids, dtype)

    def constants(self) -> dict[str, Tensor]:
        """The part of the vocabulary that is proposed; nothing where it is whole."""
        return self._head.constants()

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores the part of the vocabulary."""
        self._head.set_constants(constants)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted sum over depths of the mean loss of rows that propose an answer's token."""
        features = self._features(batch)

        def row_loss(states: Tensor, row: Tensor, place: Tensor) -> Tensor:
            if self._loss == "kl":
                return head_distillation(states, features[row, place], self._head.weight)
            return linear_cross_entropy(states, self._head.weight, batch.tokens[row, place + 1])

        outputs = self.run(batch, features, len(self._depth_weights))
        total, shown = depth_loss(batch, outputs, self._depth_weights, self._token_rows, row_loss)
        return (total, shown) if shown else (self.zero_loss(), {})

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ChainAcceptance:
        """Greedy acceptance of chains; see :func:`paceline.training.acceptance.chain_hits`."""
        outputs = self.run(batch, self._features(batch), EVAL_CHAIN)
        hits = chain_hits(batch, outputs, lambda states: self._head.best(states, 1))
        return ChainAcceptance.from_chains(hits[..., 0])

    def tensors(self) -> dict[str, Tensor]:
        """The servable checkpoint: bfloat16 by checkpoint name."""
        own = {k: p.detach().bfloat16() for k, p in self._parameters.items()}
        return own | self._head.constants()

    def export(self, folder: Path, facts: dict[str, Any]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        shape = {
            **self.shape.fields(),
            **self._head.shape(),
            "max_positions": self.target.max_positions,
        }
        config = DrafterConfig(self.method, self.target.fingerprint, self.target.name, shape, facts)
        save_drafter(folder, config, self.tensors())

    def run(self, batch: Batch, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As :func:`run_depths`, with the current parameters."""
        return run_depths(self.shape, self.compute_weights(), batch.tokens, features, self._embedding, steps)

    def _features(self, batch: Batch) -> Tensor:
        return batch.need_hidden().to(self.dtype)
