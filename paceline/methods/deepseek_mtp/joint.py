"""A model and its multi-token prediction modules trained together from scratch (DeepSeek-V3, 2412.19437, section 2.2).

Responsible for the loss: the model's own cross entropy plus a fraction of the modules' mean, whose gradients reach the
model. Model and modules share one matrix as embedding and head. For small Llama-like models, which run as in
`paceline/training/backbone.py`. Knows no optimisers and no data; :mod:`paceline.methods.deepseek_mtp.pretrain` runs it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.methods.deepseek_mtp.layer import module_prefix
from paceline.methods.deepseek_mtp.objective import run_depths
from paceline.methods.deepseek_mtp.start import default_shape
from paceline.training.backbone import Backbone
from paceline.training.head import head_best
from paceline.training.losses import linear_cross_entropy
from paceline.training.sizes import ModelSizes
from paceline.training.start import random_parameters

EMBEDDING = "model.embed_tokens.weight"
_FIRST_PHASE = 10.0 / 14.8  # of the report's 14.8 trillion tokens
_PHASE_WEIGHTS = (0.3, 0.1)


def modules_weight(fraction: float) -> float:
    """Weight of the modules' mean loss at a run's progress in ``[0, 1]`` (2412.19437, section 4.2)."""
    return _PHASE_WEIGHTS[0] if fraction < _FIRST_PHASE else _PHASE_WEIGHTS[1]


class JointPretraining:
    """Parameters and loss.

    Args:
        target: sizes of the model.
        num_modules: modules after it.
        seed: of the starting weights.
    """

    def __init__(self, target: ModelSizes, num_modules: int, seed: int) -> None:
        self.target = target
        self._backbone = Backbone.llama(target)
        # As published, a module hands on a state that is not normed.
        self.shape = replace(default_shape(target, num_modules), carries_norm=False)
        modules = self.shape.parameter_shapes()
        first = module_prefix(0)
        outside = ("enorm", "hnorm", "eh_proj", "shared_head")
        block = {
            name.removeprefix(first): size
            for name, size in modules.items()
            if name.startswith(first) and not name.removeprefix(first).startswith(outside)
        }
        sizes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (target.vocab, target.hidden),
            "model.norm.weight": (target.hidden,),
        }
        for layer in range(target.num_layers):
            sizes |= {f"model.layers.{layer}.{name}": size for name, size in block.items()}
        sizes |= modules
        self._parameters = {k: nn.Parameter(p) for k, p in random_parameters(sizes, seed).items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All that is trained: the model's by transformers' names, the modules' by checkpoint names."""
        return self._parameters

    def model_tensors(self) -> dict[str, Tensor]:
        """The model's, by transformers' names."""
        return {k: p.detach() for k, p in self._parameters.items() if k.startswith("model.")}

    def module_tensors(self) -> dict[str, Tensor]:
        """The modules', by checkpoint names."""
        return {k: p.detach() for k, p in self._parameters.items() if not k.startswith("model.")}

    def loss(self, tokens: Tensor, lengths: Tensor, fraction: float) -> tuple[Tensor, dict[str, float]]:
        """The model's cross entropy plus ``modules_weight(fraction)`` times the mean of the modules'.

        Args:
            tokens: int64 ``[rows, length]``, right-padded.
            lengths: int64 ``[rows]``.
            fraction: progress of the run in ``[0, 1]``.
        """
        if int(lengths.max()) < 2 + self.shape.num_modules:
            raise TrainingDataError("texts are too short for the modules to propose anything")
        weights: dict[str, Tensor] = dict(self._parameters)
        table = weights[EMBEDDING]
        hidden = self._backbone.final_hidden(weights, table, tokens)
        own = self._cross_entropy(hidden, tokens, lengths, 1)
        depths = [
            self._cross_entropy(out, tokens, lengths, 2 + j)
            for j, out in enumerate(
                run_depths(self.shape, weights, tokens, hidden, table, self.shape.num_modules)
            )
        ]
        modules = torch.stack(depths).mean()
        shown = {"own": float(own.detach()), "modules": float(modules.detach())}
        return own + modules_weight(fraction) * modules, shown

    @torch.no_grad()
    def agreement(self, tokens: Tensor, lengths: Tensor) -> list[tuple[int, int]]:
        """By depth, the rows where a module proposes the model's own choice, and all rows.

        The text before is given: this is the acceptance of the first token that the module drafts.

        Args:
            tokens: int64 ``[rows, length]``, right-padded.
            lengths: int64 ``[rows]``.
        """
        weights: dict[str, Tensor] = dict(self._parameters)
        table = weights[EMBEDDING]
        hidden = self._backbone.final_hidden(weights, table, tokens)
        found = []
        depths = run_depths(self.shape, weights, tokens, hidden, table, self.shape.num_modules)
        for j, out in enumerate(depths):
            # Row r proposes token r + 2 + j, which the model chooses at position r + 1 + j.
            row, position = self._rows(tokens, lengths, 2 + j)
            proposed = head_best(out[row, position], table, 1).squeeze(-1)
            chosen = head_best(hidden[row, position + 1 + j], table, 1).squeeze(-1)
            found.append((int((proposed == chosen).sum()), row.numel()))
        return found

    def _rows(self, tokens: Tensor, lengths: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Rows and positions that have a token `ahead` positions later."""
        is_text = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        row, position = is_text[:, ahead:].nonzero(as_tuple=True)
        return row, position

    def _cross_entropy(self, states: Tensor, tokens: Tensor, lengths: Tensor, ahead: int) -> Tensor:
        """Mean over rows that propose the token `ahead` positions later."""
        row, position = self._rows(tokens, lengths, ahead)
        labels = tokens[row, position + ahead]
        return linear_cross_entropy(states[row, position], self._parameters[EMBEDDING], labels)
