"""One trainer for every drafter: its options, its optimisers, held-out acceptance and what is exported.

Knows what a recipe is, and no method; the loop is in `loop.py`. Called by ``paceline train METHOD``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from paceline.contract.errors import ExportRefusedError
from paceline.training.acceptance import ChainAcceptance
from paceline.training.data import Corpus
from paceline.training.inputs import TrainingInputs
from paceline.training.loop import Loop, LoopSettings
from paceline.training.objective import Objective
from paceline.training.options import check_options, option
from paceline.training.recipe import OptionsT, Recipe
from paceline.training.shards import read_manifest, shard_indices

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options that the training of every method has; a method's own are in its recipe.

    Attributes:
        model_dir: the target.
        data_dir: target-written shards to learn from.
        heldout_dir: shards of another seed, which are never trained on.
        run_dir: checkpoints; an existing run continues from its newest.
        export_dir: servable drafter, replaced whenever held-out acceptance is the best so far.
        num_steps: optimiser steps of the whole run. May be changed on resume; the cosine follows.
        batch_tokens: padded tokens a step.
        learning_rate: peak for matrices and norms.
        head_learning_rate: peak for the output head.
        warmup_steps: linear warm-up.
        floor: last learning rate as a fraction of the peak.
        clip_norm: global gradient norm.
        clip_value: largest entry of a gradient, 0 = no limit; unless given, what the method's authors take.
        optimizer: ``adamw``, or ``muon`` (matrices by Muon, the rest by AdamW).
        seed: data order, starting weights and what is drawn while training.
        eval_every: steps between held-out evaluations.
        checkpoint_every: steps between checkpoints.
        dtype: compute type; weights and optimiser state stay float32.
        num_threads: torch threads, 0 = leave as they are.
    """

    model_dir: Path
    data_dir: Path
    heldout_dir: Path
    run_dir: Path
    export_dir: Path
    num_steps: int = option(1000, minimum=1)
    batch_tokens: int = option(2048, minimum=1)
    learning_rate: float = option(1e-3, above=0)
    head_learning_rate: float = option(3e-4, above=0)
    warmup_steps: int = option(20, minimum=1)
    floor: float = 0.02
    clip_norm: float = option(1.0, above=0)
    clip_value: float | None = option(None, minimum=0)
    optimizer: str = option("adamw", choices=("adamw", "muon"))
    seed: int = 1
    eval_every: int = option(100, minimum=1)
    checkpoint_every: int = option(100, minimum=1)
    dtype: str = option("bfloat16", choices=("bfloat16", "float32"))
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run ended: its last step and the best held-out acceptance, with the step that reached it."""

    step: int
    best_step: int
    best_mean_accepted: float
    per_depth: tuple[float, ...]


def run(
    options: TrainOptions, recipe: Recipe[OptionsT], method_options: OptionsT, stop_after: int | None = None
) -> TrainResult:
    """Train, or continue to train, until ``num_steps``.

    Args:
        options: of the run.
        recipe: how the method is trained.
        method_options: the method's own options.
        stop_after: leave after this many steps of this call, with a checkpoint.

    Raises:
        TrainingDataError: an option's value does not fit, or another target wrote the text.
    """
    check_options(options)
    check_options(method_options)
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    corpus = Corpus(options.data_dir, options.batch_tokens, options.seed)
    heldout = Corpus(options.heldout_dir, options.batch_tokens, options.seed, greedy_only=True)
    objective = build_objective(options, recipe, method_options, corpus)
    optimizers = make_optimizers(options, recipe, method_options, objective.named_parameters())
    limit = recipe.clip_value if options.clip_value is None else options.clip_value
    return _TrainingRun(options, objective, optimizers, limit, corpus, heldout).train(stop_after)


def build_objective(
    options: TrainOptions, recipe: Recipe[OptionsT], method_options: OptionsT, corpus: Corpus
) -> Objective:
    """The method's objective at its starting point.

    Raises:
        TrainingDataError: another target wrote the text.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    return recipe.build(method_options, TrainingInputs.of(options.model_dir, corpus, options.seed, dtype))


class _TrainingRun:
    def __init__(
        self,
        options: TrainOptions,
        objective: Objective,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_value: float,
        corpus: Corpus,
        heldout: Corpus,
    ) -> None:
        self._options, self._objective = options, objective
        self._corpus, self._heldout = corpus, heldout
        settings = LoopSettings(
            run_dir=options.run_dir,
            num_steps=options.num_steps,
            warmup_steps=options.warmup_steps,
            floor=options.floor,
            clip_norm=options.clip_norm,
            seed=options.seed,
            eval_every=options.eval_every,
            checkpoint_every=options.checkpoint_every,
            clip_value=clip_value,
        )
        self._loop = Loop(settings, objective, optimizers, corpus)
        notes = self._loop.notes
        self._best_step, self._best = int(notes.get("best_step", 0)), ChainAcceptance()
        if "best" in notes:
            self._best = ChainAcceptance(tuple(notes["best"]["reached"]), tuple(notes["best"]["accepted"]))

    def train(self, stop_after: int | None) -> TrainResult:
        self._loop.run(self._evaluate, stop_after)
        per_depth = tuple(self._best.per_depth)
        return TrainResult(self._loop.step, self._best_step, self._best.mean_accepted, per_depth)

    def _evaluate(self) -> None:
        counts = ChainAcceptance()
        for batch in self._heldout.epoch(0, shard_indices(self._options.heldout_dir)):
            counts = counts + self._objective.evaluate(batch)
        per_depth = [round(x, 4) for x in counts.per_depth]
        step = self._loop.step
        log.info(
            "heldout",
            step=step,
            per_depth=per_depth,
            mean_accepted=round(counts.mean_accepted, 4),
            committed_per_round=round(1 + counts.mean_accepted, 4),
            chains=counts.reached[0] if counts.reached else 0,
        )
        if counts.mean_accepted > self._best.mean_accepted or self._best_step == 0:
            before = self._best, self._best_step
            self._best, self._best_step = counts, step
            try:
                self._objective.export(self._options.export_dir, self._facts())
            except ExportRefusedError as refusal:
                self._best, self._best_step = before
                log.warning("not exported", step=step, reason=str(refusal))
        best = {"reached": self._best.reached, "accepted": self._best.accepted}
        self._loop.notes = {"best_step": self._best_step, "best": best}

    def _facts(self) -> dict[str, Any]:
        manifest = read_manifest(self._corpus.folder)  # anew: a growing folder has grown
        return {
            "steps": self._loop.step,
            "tokens": self._loop.tokens,
            "seconds": round(self._loop.elapsed_s),
            "epochs": self._loop.position.epoch,
            "data": {k: manifest.get(k) for k in ("command", "counts", "model_fingerprint")},
            "heldout_greedy_acceptance_per_depth": [round(x, 4) for x in self._best.per_depth],
            f"heldout_mean_accepted_of_{len(self._best.reached)}": round(self._best.mean_accepted, 4),
            "seed": self._options.seed,
        }


def make_optimizers(
    options: TrainOptions,
    recipe: Recipe[OptionsT],
    method_options: OptionsT,
    parameters: Mapping[str, nn.Parameter],
) -> list[torch.optim.Optimizer]:
    """AdamW with its own rate for the head; with ``muon``, matrices other than the head go to Muon.

    Parameters of the target itself always go to AdamW, at a rate that is smaller by the recipe's divisor.
    """
    divisors = recipe.rate_divisors(method_options)
    heads: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    of_target: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        divisor = next((by for prefix, by in divisors.items() if name.startswith(prefix)), None)
        if divisor is not None:
            of_target.setdefault(divisor, []).append(parameter)
        elif name.startswith(recipe.head_prefixes) or "embed" in name:
            heads.append(parameter)
        else:
            (matrices if parameter.ndim == 2 else rest).append(parameter)
    muon = options.optimizer == "muon"
    adam_groups: list[tuple[list[nn.Parameter], float]] = [
        (heads, options.head_learning_rate),
        (rest, options.learning_rate),
        *((own, options.learning_rate / divisor) for divisor, own in of_target.items()),
    ]
    if not muon:
        adam_groups.append((matrices, options.learning_rate))
    groups = [{"params": own, "lr": lr, "peak_lr": lr} for own, lr in adam_groups if own]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]
    if muon:
        group = {"params": matrices, "lr": options.learning_rate, "peak_lr": options.learning_rate}
        optimizers.append(torch.optim.Muon([group], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return optimizers
