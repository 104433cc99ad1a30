"""The loop of a training run: steps, warm-up and cosine, exact resume, evaluations and checkpoints.

Responsible for everything that does not depend on what is trained, which is a :class:`Trainee`. Called by
:mod:`paceline.training.trainer` (drafters) and :mod:`paceline.methods.deepseek_mtp.pretrain` (a model from nothing).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError, TrainingError
from paceline.training.data import Batch, Corpus, DataPosition
from paceline.training.run_state import (
    RunState,
    flatten_optimizer,
    load_newest_run,
    restore_optimizer,
    save_run,
)

log = structlog.get_logger()


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int, floor: float) -> float:
    """Linear warm-up, then a cosine: factor on the peak rate for 0-based ``step``; ``floor`` from ``num_steps`` on."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Trainee(Protocol):
    """What a loop trains."""

    method: str

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Everything the optimisers move, by name."""

    def constants(self) -> dict[str, Tensor]:
        """What was fixed when training began; kept in every checkpoint."""

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        """Restores what :meth:`constants` gave."""

    def set_progress(self, fraction: float) -> None:
        """Called before each step with the run's progress in ``[0, 1]``: a curriculum may follow it."""

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """A scalar to minimise, and numbers to show."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The options of a run that its loop needs.

    Attributes:
        run_dir: checkpoints; an existing run continues from its newest.
        num_steps: optimiser steps of the whole run.
        warmup_steps: linear warm-up.
        floor: last learning rate as a fraction of the peak.
        clip_norm: global gradient norm.
        seed: of what is drawn while training.
        eval_every: steps between evaluations; there is one after the last step, too.
        checkpoint_every: steps between checkpoints.
        clip_value: largest entry of a gradient, 0 = no limit.
    """

    run_dir: Path
    num_steps: int
    warmup_steps: int
    floor: float
    clip_norm: float
    seed: int
    eval_every: int
    checkpoint_every: int
    clip_value: float = 0.0


class Loop:
    """A run. A new object continues from the newest checkpoint in ``run_dir``.

    Args:
        settings: how it runs.
        trainee: what is trained.
        optimizers: of its parameters; every group has its ``peak_lr``.
        corpus: text.
    """

    def __init__(
        self,
        settings: LoopSettings,
        trainee: Trainee,
        optimizers: Sequence[torch.optim.Optimizer],
        corpus: Corpus,
    ) -> None:
        self._settings, self._trainee, self._corpus = settings, trainee, corpus
        self._optimizers = list(optimizers)
        self._parameters = trainee.named_parameters()
        self._seconds = 0.0  # of earlier processes of this run
        self._started_s = time.monotonic()
        self.step = 0
        self.tokens = 0
        self.position = DataPosition()
        self.notes: dict[str, Any] = {}
        """JSON that checkpoints keep for the caller."""
        torch.manual_seed(settings.seed)  # for noise and dropout; a continued run restores its own state
        state = load_newest_run(settings.run_dir)
        if state is not None:
            self._restore(state)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, evaluation included, in all processes of this run."""
        return self._seconds + time.monotonic() - self._started_s

    def run(self, evaluate: Callable[[], None], stop_after: int | None = None) -> None:
        """Trains until the last step.

        Args:
            evaluate: called when an evaluation is due.
            stop_after: leave after this many steps of this call, with a checkpoint.

        Raises:
            TrainingError: the loss is not finite.
        """
        settings = self._settings
        last = settings.num_steps if stop_after is None else min(settings.num_steps, self.step + stop_after)
        self._started_s, tokens_before = time.monotonic(), self.tokens
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task(self._trainee.method, total=settings.num_steps, completed=self.step)
            batches = self._corpus.batches(self.position)
            while self.step < last:
                batch = next(batches)
                shown = self._update(batch)
                self.step += 1
                self.tokens += batch.num_tokens
                progress.advance(task)
                if self.step % 10 == 0:
                    rate = round((self.tokens - tokens_before) / (time.monotonic() - self._started_s))
                    rounded = {k: round(v, 3) for k, v in shown.items()}
                    log.info("step", step=self.step, tokens=self.tokens, rate=rate, **rounded)
                if self.step % settings.eval_every == 0 or self.step == settings.num_steps:
                    evaluate()
                if self.step % settings.checkpoint_every == 0 or self.step == last:
                    self._save()

    def _update(self, batch: Batch) -> dict[str, float]:
        settings = self._settings
        self._trainee.set_progress(self.step / settings.num_steps)
        factor = learning_rate_factor(self.step, settings.num_steps, settings.warmup_steps, settings.floor)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.zero_grad(set_to_none=True)
        loss, shown = self._trainee.loss(batch)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"the loss is {float(loss.detach())} at step {self.step}; the last checkpoint is intact"
            )
        loss.backward()
        parameters = list(self._parameters.values())
        if settings.clip_value:
            nn.utils.clip_grad_value_(parameters, settings.clip_value)
        norm = nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        return {**shown, "grad_norm": float(norm), "lr_fraction": factor}

    def _save(self) -> None:
        meta = {
            "method": self._trainee.method,
            "tokens": self.tokens,
            "seconds": self.elapsed_s,
            "position": self.position.to_json(),
            "notes": self.notes,
        }
        weights = {k: p.detach().clone() for k, p in self._parameters.items()}
        optimizer = flatten_optimizer(self._optimizers, self._parameters)
        save_run(
            self._settings.run_dir,
            self.step,
            RunState(weights, self._trainee.constants(), optimizer, meta),
        )

    def _restore(self, state: RunState) -> None:
        meta, folder = state.meta, self._settings.run_dir
        shapes = {name: tensor.shape for name, tensor in state.weights.items()}
        if meta.get("method") != self._trainee.method or set(shapes) != set(self._parameters):
            raise TrainingDataError(f"{folder} holds another kind of run")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.shape != shapes[name]:
                    raise TrainingDataError(f"{folder} holds another kind of run: {name} has another shape")
                parameter.copy_(state.weights[name])
        self._trainee.set_constants(state.constants)
        restore_optimizer(self._optimizers, self._parameters, state.optimizer)
        self.step, self.tokens = int(meta["step"]), int(meta["tokens"])
        self._seconds = float(meta.get("seconds", 0.0))  # runs that began before it was kept
        self.position = DataPosition.from_json(meta["position"])
        # Runs that began before notes kept theirs beside the rest.
        self.notes = meta.get("notes") or {k: meta[k] for k in ("best_step", "best") if k in meta}
        log.info("resumed", step=self.step, tokens=self.tokens)
