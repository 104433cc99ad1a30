"""One trainer for every drafter: its options, its optimisers, held-out acceptance and what is exported.

Knows the objective seam and nothing of any method; the loop is in `loop.py`. Called by ``paceline train METHOD``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from paceline.contract.errors import ExportRefusedError, TrainingDataError
from paceline.methods.medusa2.tuned_backbone import PREFIX as BACKBONE_PREFIX
from paceline.methods.objectives import GRADIENT_LIMITS, build_objective
from paceline.training.acceptance import AcceptanceCounts
from paceline.training.data import Corpus
from paceline.training.loop import Loop, LoopSettings
from paceline.training.objective import Objective
from paceline.training.shards import read_manifest, shard_indices

log = structlog.get_logger()

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("bfloat16", "float32"),
    "optimizer": ("adamw", "muon"),
    "output": ("own", "shared", "target"),
    "head_start": ("target", "linear"),
    "heads_schedule": ("constant", "linear", "sine"),
    "base_loss": ("kl", "ce"),
    "depth_loss": ("ce", "kl"),
    "markov_head": ("vanilla", "gated", "rnn"),
    "block_layout": ("published", "infilling", "anchor_first"),
}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of :func:`run`.

    Attributes:
        method: drafter method, such as ``eagle3``; see `paceline.methods.objectives`.
        model_dir: the target.
        data_dir: target-written shards to learn from.
        heldout_dir: shards of another seed, never trained on.
        run_dir: checkpoints; an existing run goes on from its newest.
        start_dir: a small model of the target's tokenizer to start from, instead of layers cut from the target
            (``pard1`` and ``pard2``).
        export_dir: servable drafter, replaced whenever held-out acceptance is the best so far.
        num_steps: optimiser steps of the whole run. May be changed on resume; the cosine follows.
        batch_tokens: padded tokens a step.
        learning_rate: peak for matrices and norms.
        head_learning_rate: peak for the output head.
        warmup_steps: linear warm-up.
        floor: last learning rate as a share of the peak.
        clip_norm: global gradient norm.
        clip_value: largest entry of a gradient, 0 = no limit; unless given, what the method's authors take.
        optimizer: ``adamw``, or ``muon`` (matrices by Muon, the rest by AdamW).
        seed: data order, starting weights and what is drawn while training.
        draft_vocab: size of a reduced draft vocabulary, where the method has one; 0 = whole, for methods that may
            have that (``independent``, ``eagle1``, ``eagle2``, ``deepseek_mtp``, ``dflash``, ``dspark``, PARD).
        test_steps: unrolled steps of training-time test, where the method has it.
        step_decay: loss ratio of one such step to the one before.
        feature_weight: of the loss on predicted features, where the method predicts them.
        token_weight: of the cross entropy beside it, or beside the divergence from the target (``pard2``).
        token_rows: rows of a batch whose cross entropy such a method computes, and Medusa-2 its target's loss, chosen
            at random; 0 = all.
        feature_drop: share of texts learned without the target's features, where the method can do without.
        feature_noise: largest entry of the noise on features that such a method reads while it learns.
        num_layers: layers cut from the target, where the method does that (half from either end), or of the drafter
            itself, where it may have several.
        num_modules: multi-token prediction modules in sequence.
        depth_loss: of such modules, and of ``gemma4_mtp``: ``ce`` on the text's tokens, or ``kl`` to the target's
            distributions.
        draft_hidden: width of a drafter that is narrower than its target, where the method has one.
        draft_intermediate: of its gated product.
        num_clusters: clusters of its exported output head, which scores the tokens of the best of them alone; 0 scores
            all tokens.
        num_selected: clusters that such a head scores.
        num_depths: tokens drafted in one pass, where the method does that.
        keep_ratio: rows trained at each such depth, of the depth before.
        keep_floor: least share of rows at any such depth; unless given, what the method's authors take.
        num_segments: segments of a text whose gradients are taken one after the other, where the method can: less
            memory.
        block_size: rows of a block, the last committed token's included, where the method drafts blocks.
        block_layout: ``infilling`` (a row proposes the token at its own position), ``anchor_first`` (the one behind it)
            or ``published`` (what the method's authors take).
        num_anchors: blocks of a text and step, at most.
        block_decay: places behind a block's first over which a proposal's weight falls by e.
        markov_head: of DSpark: ``vanilla``, ``gated`` or ``rnn``.
        markov_rank: of its bias.
        token_share: of the cross entropy against the text in DSpark's loss.
        distance_share: of the distance from the target's probabilities.
        confidence_share: of the confidence head's error.
        num_heads: Medusa's heads.
        output: Medusa's output heads: ``own`` (one each), ``shared`` (one for all), or ``target`` (the target's).
        head_start: where Medusa's own output heads begin: ``target`` (the target's rows) or ``linear`` (those behind a
            linear look-ahead that is fitted first).
        heads_coefficient: weight of Medusa-2's heads beside the loss of its target.
        heads_schedule: of that weight over the joint stage: ``constant``, ``linear`` or ``sine``.
        heads_first: share of a Medusa-2 run in which the heads alone are trained.
        base_loss: of Medusa-2's target: ``kl`` to the original, or ``ce`` on the text.
        max_loss_increase: held-out nats a token that Medusa-2's tuned target may be worse by.
        backbone_divisor: how many times smaller the learning rate of Medusa-2's target is.
        lora_rank: of the updates of Medusa-2's target.
        lora_alpha: their scale.
        lora_dropout: share of their inputs left out.
        eval_every: steps between held-out evaluations.
        checkpoint_every: steps between checkpoints.
        dtype: compute type; weights and optimiser state stay float32.
        num_threads: torch threads, 0 = leave as they are.
    """

    method: str
    model_dir: Path
    data_dir: Path
    heldout_dir: Path
    run_dir: Path
    export_dir: Path
    start_dir: Path | None = None
    num_steps: int = 1000
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    head_learning_rate: float = 3e-4
    warmup_steps: int = 20
    floor: float = 0.02
    clip_norm: float = 1.0
    clip_value: float | None = None
    optimizer: str = "adamw"
    seed: int = 1
    draft_vocab: int = 7680
    test_steps: int = 4
    step_decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    token_rows: int = 0
    feature_drop: float = 0.1
    feature_noise: float = 0.1
    num_layers: int = 4
    num_modules: int = 1
    depth_loss: str = "ce"
    draft_hidden: int = 256
    draft_intermediate: int = 1024
    num_clusters: int = 0
    num_selected: int = 32
    num_depths: int = 8
    keep_ratio: float = 0.7
    keep_floor: float | None = None
    num_segments: int = 1
    block_size: int = 8
    block_layout: str = "published"
    num_anchors: int = 64
    block_decay: float = 4.0
    markov_head: str = "vanilla"
    markov_rank: int = 256
    token_share: float = 0.1
    distance_share: float = 0.9
    confidence_share: float = 1.0
    num_heads: int = 5
    output: str = "own"
    head_start: str = "linear"
    heads_coefficient: float = 0.2
    heads_schedule: str = "constant"
    heads_first: float = 0.3
    base_loss: str = "kl"
    max_loss_increase: float = 0.05
    backbone_divisor: float = 4.0
    lora_rank: int = 32
    lora_alpha: float = 16.0
    lora_dropout: float = 0.05
    eval_every: int = 100
    checkpoint_every: int = 100
    dtype: str = "bfloat16"
    num_threads: int = 0

    def validate(self) -> None:
        """Raises :class:`TrainingDataError` naming the first field out of range."""
        for name in (
            "num_steps",
            "batch_tokens",
            "warmup_steps",
            "test_steps",
            "num_layers",
            "num_modules",
            "draft_hidden",
            "draft_intermediate",
            "num_selected",
            "num_depths",
            "num_segments",
            "block_size",
            "num_anchors",
            "markov_rank",
            "num_heads",
            "lora_rank",
            "eval_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise TrainingDataError(f"{name} must be at least 1")
        for name in (
            *("learning_rate", "head_learning_rate", "clip_norm", "step_decay", "block_decay"),
            *("heads_coefficient", "backbone_divisor", "lora_alpha"),
        ):
            if not getattr(self, name) > 0:
                raise TrainingDataError(f"{name} must be positive")
        if self.draft_vocab < 0:
            raise TrainingDataError("draft_vocab must not be negative")
        if self.token_rows < 0:
            raise TrainingDataError("token_rows must not be negative")
        if self.num_clusters < 0:
            raise TrainingDataError("num_clusters must not be negative")
        for name in (
            *("clip_value", "feature_weight", "token_weight", "feature_noise"),
            *("token_share", "distance_share", "confidence_share"),
        ):
            if not (getattr(self, name) or 0.0) >= 0:
                raise TrainingDataError(f"{name} must not be negative")
        if not 0 < self.keep_ratio <= 1:
            raise TrainingDataError("keep_ratio must be above 0 and at most 1")
        if not 0 <= (self.keep_floor or 0.0) <= 1:
            raise TrainingDataError("keep_floor must be from 0 to 1")
        for name in ("feature_drop", "heads_first", "lora_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise TrainingDataError(f"{name} must be at least 0 and below 1")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise TrainingDataError(f"{name} must be {' or '.join(known)}")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run ended: its last step and the best held-out acceptance, with the step that reached it."""

    step: int
    best_step: int
    best_mean_accepted: float
    per_depth: tuple[float, ...]


def run(options: TrainOptions, stop_after: int | None = None) -> TrainResult:
    """Trains, or goes on training, until ``num_steps``.

    Args:
        options: the run.
        stop_after: leave after this many steps of this call, with a checkpoint.
    """
    options.validate()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    corpus = Corpus(options.data_dir, options.batch_tokens, options.seed)
    heldout = Corpus(options.heldout_dir, options.batch_tokens, options.seed, greedy_only=True)
    objective = build_objective(options, corpus)
    return _Run(options, objective, corpus, heldout).train(stop_after)


class _Run:
    def __init__(self, options: TrainOptions, objective: Objective, corpus: Corpus, heldout: Corpus) -> None:
        self._options, self._objective = options, objective
        self._corpus, self._heldout = corpus, heldout
        limit = options.clip_value
        settings = LoopSettings(
            run_dir=options.run_dir,
            num_steps=options.num_steps,
            warmup_steps=options.warmup_steps,
            floor=options.floor,
            clip_norm=options.clip_norm,
            seed=options.seed,
            eval_every=options.eval_every,
            checkpoint_every=options.checkpoint_every,
            clip_value=GRADIENT_LIMITS.get(options.method, 0.0) if limit is None else limit,
        )
        optimizers = make_optimizers(options, objective.named_parameters())
        self._loop = Loop(settings, objective, optimizers, corpus)
        notes = self._loop.notes
        self._best_step, self._best = int(notes.get("best_step", 0)), AcceptanceCounts()
        if "best" in notes:
            self._best = AcceptanceCounts(tuple(notes["best"]["reached"]), tuple(notes["best"]["accepted"]))

    def train(self, stop_after: int | None) -> TrainResult:
        self._loop.run(self._evaluate, stop_after)
        per_depth = tuple(self._best.per_depth)
        return TrainResult(self._loop.step, self._best_step, self._best.mean_accepted, per_depth)

    def _evaluate(self) -> None:
        counts = AcceptanceCounts()
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
    options: TrainOptions, parameters: dict[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """AdamW with its own rate for the head; with ``muon``, matrices other than the head go to Muon.

    What is tuned of the target itself goes to AdamW at a rate that is `backbone_divisor` times smaller.
    """

    def named(select: Any) -> list[nn.Parameter]:
        return [p for k, p in parameters.items() if select(k, p)]

    def is_head(name: str, _: nn.Parameter) -> bool:
        return name.startswith(("lm_head", "markov_head.markov_w")) or "embed" in name

    def is_backbone(name: str, _: nn.Parameter) -> bool:
        return name.startswith(BACKBONE_PREFIX)

    def is_own(name: str, parameter: nn.Parameter) -> bool:
        return not is_head(name, parameter) and not is_backbone(name, parameter)

    muon = options.optimizer == "muon"
    heads = named(lambda k, p: is_head(k, p) and not is_backbone(k, p))
    matrices = named(lambda k, p: p.ndim == 2 and is_own(k, p))
    rest = named(lambda k, p: p.ndim != 2 and is_own(k, p))
    adam_groups: list[tuple[Sequence[nn.Parameter], float]] = [
        (heads, options.head_learning_rate),
        (rest, options.learning_rate),
        (named(is_backbone), options.learning_rate / options.backbone_divisor),
    ]
    if not muon:
        adam_groups.append((matrices, options.learning_rate))
    groups = [{"params": list(p), "lr": lr, "peak_lr": lr} for p, lr in adam_groups if p]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)]
    if muon:
        group = {"params": matrices, "lr": options.learning_rate, "peak_lr": options.learning_rate}
        optimizers.append(torch.optim.Muon([group], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return optimizers
