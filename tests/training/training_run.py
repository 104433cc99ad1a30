"""A training run as tests ask for one: by the method's name, with options of the run and of the method together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from paceline.methods.registry import METHODS, training_recipe
from paceline.training import trainer
from paceline.training.data import Corpus
from paceline.training.objective import Objective
from paceline.training.trainer import TrainOptions, TrainResult


def _names(options_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(options_class)}


class TrainingRun:
    """Options of the run and of its method; fields that only other methods have are left out."""

    def __init__(
        self,
        method: str,
        model_dir: Path,
        data_dir: Path,
        heldout_dir: Path,
        run_dir: Path,
        export_dir: Path,
        **fields: Any,
    ) -> None:
        self._fields = {
            "method": method,
            "model_dir": model_dir,
            "data_dir": data_dir,
            "heldout_dir": heldout_dir,
            "run_dir": run_dir,
            "export_dir": export_dir,
            **fields,
        }
        self.method, self.run_dir, self.export_dir = method, run_dir, export_dir
        self.recipe = training_recipe(method)
        shared, own = _names(TrainOptions), _names(self.recipe.options)
        others = {name for each in METHODS for name in _names(training_recipe(each).options)}
        if unknown := set(self._fields) - shared - others - {"method"}:
            raise TypeError(f"no method has {sorted(unknown)}")
        self.options = TrainOptions(**{k: v for k, v in self._fields.items() if k in shared})
        self.own = self.recipe.options(**{k: v for k, v in self._fields.items() if k in own})

    def replace(self, **changes: Any) -> TrainingRun:
        """The same run with other options."""
        return TrainingRun(**{**self._fields, **changes})

    def train(self, stop_after: int | None = None) -> TrainResult:
        return trainer.run(self.options, self.recipe, self.own, stop_after)

    def objective(self, corpus: Corpus) -> Any:
        """The method's objective; `Any`, for tests look into it."""
        objective: Objective = trainer.build_objective(self.options, self.recipe, self.own, corpus)
        return objective

    def optimizers(self, objective: Objective) -> list[torch.optim.Optimizer]:
        return trainer.make_optimizers(self.options, self.recipe, self.own, objective.named_parameters())
