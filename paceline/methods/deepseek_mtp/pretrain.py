"""``paceline pretrain``: a small Llama and its multi-token prediction modules, trained together from nothing.

DeepSeek-V3 did so at its size (2412.19437, sections 2.2 and 4.2); here modules can be measured beside a model that they
helped to train. A run writes a pair: the model as transformers saves it, and the modules as a drafter for it. The loss
is in `joint.py`, the loop in `paceline.training.loop`. Text comes from any shards with a known tokenizer; their
features are not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn

from paceline.contract.errors import TrainingDataError
from paceline.methods.deepseek_mtp.joint import JointPretraining
from paceline.methods.deepseek_mtp.pretrained_pair import write_pair
from paceline.training.data import Batch, Corpus
from paceline.training.loop import Loop, LoopSettings
from paceline.training.options import check_options, option
from paceline.training.shards import shard_indices
from paceline.training.sizes import ModelSizes

log = structlog.get_logger()

_ROPE_THETA, _RMS_EPS, _MAX_POSITIONS = 10_000.0, 1e-5, 2048


@dataclass(frozen=True, slots=True)
class PretrainOptions:
    """Options of :func:`run`.

    Attributes:
        tokenizer_dir: a model directory whose tokenizer the text was written with.
        data_dir: shards to learn from.
        heldout_dir: shards of another seed.
        run_dir: checkpoints; an existing run continues from its newest.
        export_dir: gets ``model`` and ``drafter`` at every evaluation.
        hidden: width of the model.
        num_layers: layers of the model.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: width of a head.
        intermediate: width of the gated MLP.
        num_modules: multi-token prediction modules in sequence.
        num_steps: optimiser steps; the modules' weight falls from 0.3 to 0.1 at 68 % of them.
        batch_tokens: padded tokens a step.
        learning_rate: peak learning rate.
        warmup_steps: linear warm-up.
        floor: last learning rate as a fraction of the peak.
        clip_norm: global gradient norm.
        seed: data order and starting weights.
        eval_every: steps between held-out evaluations.
        checkpoint_every: steps between checkpoints.
        num_threads: torch threads, 0 = leave as they are.
    """

    tokenizer_dir: Path
    data_dir: Path
    heldout_dir: Path
    run_dir: Path
    export_dir: Path
    hidden: int = option(192, above=0)
    num_layers: int = option(4, above=0)
    num_heads: int = option(6, above=0)
    num_kv_heads: int = option(2, above=0)
    head_dim: int = option(32, above=0)
    intermediate: int = option(512, above=0)
    num_modules: int = option(1, above=0)
    num_steps: int = option(2000, above=0)
    batch_tokens: int = option(2048, above=0)
    learning_rate: float = option(2e-3, above=0)
    warmup_steps: int = option(100, above=0)
    floor: float = option(0.05, above=0)
    clip_norm: float = option(1.0, above=0)
    seed: int = 1
    eval_every: int = option(200, above=0)
    checkpoint_every: int = option(100, above=0)
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """Where a run ended.

    Attributes:
        step: the last step.
        own: held-out cross entropy of the model, nats a token.
        modules: mean held-out cross entropy of the modules.
        accepted: by depth, how often a module proposes the model's own choice, given the text before.
    """

    step: int
    own: float
    modules: float
    accepted: tuple[float, ...]


def run(options: PretrainOptions, stop_after: int | None = None) -> PretrainResult:
    """Train, or continue to train, until ``num_steps``.

    Args:
        options: the run.
        stop_after: leave after this many steps of this call, with a checkpoint.
    """
    check_options(options)
    if options.num_heads % options.num_kv_heads:
        raise TrainingDataError("num_kv_heads must divide num_heads")
    if options.head_dim % 2:
        raise TrainingDataError("head_dim must be even")
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    return _PretrainingRun(options).train(stop_after)


class _Trainee:
    """The model and its modules, in the form that the loop trains."""

    method = "deepseek_mtp, from scratch"

    def __init__(self, joint: JointPretraining) -> None:
        self._joint = joint
        self._fraction = 0.0

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self._joint.named_parameters()

    def constants(self) -> dict[str, Tensor]:
        return {}

    def set_constants(self, constants: dict[str, Tensor]) -> None:
        pass

    def set_progress(self, fraction: float) -> None:
        self._fraction = fraction

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return self._joint.loss(batch.tokens, batch.lengths, self._fraction)


class _PretrainingRun:
    def __init__(self, options: PretrainOptions) -> None:
        self._options = options
        config = json.loads((options.tokenizer_dir / "config.json").read_text())
        shape = ModelSizes(
            hidden=options.hidden,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            intermediate=options.intermediate,
            vocab=int(config["vocab_size"]),
            rope_theta=_ROPE_THETA,
            rms_eps=_RMS_EPS,
            max_positions=_MAX_POSITIONS,
        )
        self._joint = JointPretraining(shape, options.num_modules, options.seed)
        rate = options.learning_rate
        group = {"params": list(self._joint.named_parameters().values()), "lr": rate, "peak_lr": rate}
        optimizer = torch.optim.AdamW([group], betas=(0.9, 0.95), weight_decay=0.0)
        corpus, self._heldout = (
            Corpus(folder, options.batch_tokens, options.seed, with_features=False)
            for folder in (options.data_dir, options.heldout_dir)
        )
        settings = LoopSettings(
            run_dir=options.run_dir,
            num_steps=options.num_steps,
            warmup_steps=options.warmup_steps,
            floor=options.floor,
            clip_norm=options.clip_norm,
            seed=options.seed,
            eval_every=options.eval_every,
            checkpoint_every=options.checkpoint_every,
        )
        self._loop = Loop(settings, _Trainee(self._joint), [optimizer], corpus)
        self._result: PretrainResult | None = None

    def train(self, stop_after: int | None) -> PretrainResult:
        self._loop.run(self._export, stop_after)
        if self._result is None or self._result.step != self._loop.step:
            return self._evaluate()
        return self._result

    @torch.no_grad()
    def _evaluate(self) -> PretrainResult:
        own = modules = 0.0
        right, count, num_batches = (
            torch.zeros(self._options.num_modules),
            torch.zeros(self._options.num_modules),
            0,
        )
        for batch in self._heldout.epoch(0, shard_indices(self._options.heldout_dir)):
            _, shown = self._joint.loss(batch.tokens, batch.lengths, 1.0)
            own, modules, num_batches = own + shown["own"], modules + shown["modules"], num_batches + 1
            for j, (agreed, of) in enumerate(self._joint.agreement(batch.tokens, batch.lengths)):
                right[j] += agreed
                count[j] += of
        accepted = tuple(round(float(x), 4) for x in right / count.clamp_min(1))
        n = max(num_batches, 1)
        result = PretrainResult(self._loop.step, own / n, modules / n, accepted)
        log.info(
            "heldout",
            step=result.step,
            own=round(result.own, 4),
            modules=round(result.modules, 4),
            accepted=accepted,
        )
        return result

    def _export(self) -> None:
        """Evaluate, and write the model and its modules."""
        result = self._result = self._evaluate()
        facts = {
            "from_scratch": True,
            "steps": result.step,
            "tokens": self._loop.tokens,
            "heldout_own": round(result.own, 4),
            "heldout_modules": round(result.modules, 4),
            "heldout_accepted": list(result.accepted),
            "seed": self._options.seed,
        }
        write_pair(self._options.export_dir, self._joint, self._options.tokenizer_dir, facts)
