"""``paceline pretrain``: a small Llama and its multi-token prediction modules, trained together from nothing.

What DeepSeek-V3 did at its size (2412.19437, sections 2.2 and 4.2), so that modules can be measured beside a model that
they helped to train. Responsible for the run: data, optimiser, checkpoints, and the pair that it writes: the model as
transformers saves it, and the modules as a drafter for it. The loss is in `deepseek_mtp_joint.py`. Text comes from any
shards whose tokenizer is at hand; their features are not read.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from paceline.drafters.checkpoint import DrafterConfig, save_drafter
from paceline.models import copy_tokenizer, model_fingerprint
from paceline.training.checkpoints import (
    RunState,
    flatten_optimizer,
    load_newest_run,
    restore_optimizer,
    save_run,
)
from paceline.training.data import Corpus, DataPosition
from paceline.training.deepseek_mtp_joint import JointPretraining
from paceline.training.errors import TrainingDataError, TrainingError
from paceline.training.schedule import learning_rate_factor
from paceline.training.shards import shard_indices
from paceline.training.teacher import TeacherShape
from paceline.weights_file import write_weights

log = structlog.get_logger()

METHOD = "deepseek_mtp, from scratch"
_GENERATION = "generation_config.json"  # which tokens end a text
_ROPE_THETA, _RMS_EPS, _MAX_POSITIONS = 10_000.0, 1e-5, 2048


@dataclass(frozen=True, slots=True)
class PretrainOptions:
    """Options of :func:`run`.

    Attributes:
        tokenizer_dir: a model directory whose tokenizer the text was written with.
        data_dir: shards to learn from.
        heldout_dir: shards of another seed.
        run_dir: checkpoints; an existing run goes on from its newest.
        export_dir: gets ``model`` and ``drafter`` at every evaluation.
        hidden: width of the model.
        num_layers: its layers.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: width of a head.
        intermediate: of the gated product.
        num_modules: multi-token prediction modules in sequence.
        num_steps: optimiser steps; the modules' weight falls from 0.3 to 0.1 at 68 % of them.
        batch_tokens: padded tokens a step.
        learning_rate: peak.
        warmup_steps: linear warm-up.
        floor: last learning rate as a share of the peak.
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
    hidden: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 512
    num_modules: int = 1
    num_steps: int = 2000
    batch_tokens: int = 2048
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    floor: float = 0.05
    clip_norm: float = 1.0
    seed: int = 1
    eval_every: int = 200
    checkpoint_every: int = 100
    num_threads: int = 0

    def validate(self) -> None:
        """Raises :class:`TrainingDataError` naming the first field out of range."""
        for name, value in asdict(self).items():
            if name in (
                "tokenizer_dir",
                "data_dir",
                "heldout_dir",
                "run_dir",
                "export_dir",
                "num_threads",
                "seed",
            ):
                continue
            if not value > 0:
                raise TrainingDataError(f"{name} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise TrainingDataError("num_kv_heads must divide num_heads")
        if self.head_dim % 2:
            raise TrainingDataError("head_dim must be even")


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """Where a run ended.

    Attributes:
        step: its last.
        own: held-out cross entropy of the model, nats a token.
        modules: mean of the modules'.
        accepted: by depth, how often a module proposes what the model itself chooses, given the text before.
    """

    step: int
    own: float
    modules: float
    accepted: tuple[float, ...]


def run(options: PretrainOptions, stop_after: int | None = None) -> PretrainResult:
    """Trains, or goes on training, until ``num_steps``.

    Args:
        options: the run.
        stop_after: leave after this many steps of this call, with a checkpoint.
    """
    options.validate()
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    return _Run(options).train(stop_after)


class _Run:
    def __init__(self, options: PretrainOptions) -> None:
        self._options = options
        config = json.loads((options.tokenizer_dir / "config.json").read_text())
        self._tokenizer_config: Mapping[str, Any] = config
        shape = TeacherShape(
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
        self._parameters = self._joint.named_parameters()
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        corpora = [
            Corpus(folder, options.batch_tokens, options.seed, with_features=False)
            for folder in (options.data_dir, options.heldout_dir)
        ]
        self._corpus, self._heldout = corpora
        self._position = DataPosition()
        self._step = self._tokens = 0
        state = load_newest_run(options.run_dir)
        if state is not None:
            self._restore(state)

    def train(self, stop_after: int | None) -> PretrainResult:
        options = self._options
        last = options.num_steps if stop_after is None else min(options.num_steps, self._step + stop_after)
        started, tokens_before = time.monotonic(), self._tokens
        batches = self._corpus.batches(self._position)
        result = PretrainResult(self._step, 0.0, 0.0, ())
        while self._step < last:
            batch = next(batches)
            shown = self._update(batch.tokens, batch.lengths)
            self._step += 1
            self._tokens += batch.num_tokens
            if self._step % 10 == 0:
                rate = (self._tokens - tokens_before) / (time.monotonic() - started)
                log.info(
                    "step",
                    step=self._step,
                    tokens=self._tokens,
                    rate=round(rate),
                    **{name: round(value, 3) for name, value in shown.items()},
                )
            if self._step % options.eval_every == 0 or self._step == options.num_steps:
                result = self._evaluate()
                self._export(result)
            if self._step % options.checkpoint_every == 0 or self._step == last:
                self._save()
        return result if result.accepted else self._evaluate()

    def _update(self, tokens: Tensor, lengths: Tensor) -> dict[str, float]:
        options = self._options
        factor = learning_rate_factor(self._step, options.num_steps, options.warmup_steps, options.floor)
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        self._optimizer.zero_grad(set_to_none=True)
        loss, shown = self._joint.loss(tokens, lengths, self._step / options.num_steps)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"loss is {float(loss.detach())} at step {self._step}; the last checkpoint is intact"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(list(self._parameters.values()), options.clip_norm)
        self._optimizer.step()
        return shown

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
        result = PretrainResult(self._step, own / n, modules / n, accepted)
        log.info(
            "heldout",
            step=self._step,
            own=round(result.own, 4),
            modules=round(result.modules, 4),
            accepted=accepted,
        )
        return result

    def _export(self, result: PretrainResult) -> None:
        """The pair: a model that transformers loads, and a drafter bound to it."""
        model, target = self._options.export_dir / "model", self._joint.target
        write_weights(model / "model.safetensors", self._joint.model_tensors())
        ends = {
            name: self._tokenizer_config.get(name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        content = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": target.vocab,
            "hidden_size": target.hidden,
            "intermediate_size": target.intermediate,
            "num_hidden_layers": target.num_layers,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": target.rms_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
            "max_position_embeddings": target.max_positions,
            "tie_word_embeddings": True,
            "dtype": "float32",
            **ends,
        }
        copy_tokenizer(self._options.tokenizer_dir, model)
        if (self._options.tokenizer_dir / _GENERATION).is_file():
            shutil.copyfile(self._options.tokenizer_dir / _GENERATION, model / _GENERATION)
        (model / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        shape = {**asdict(self._joint.shape), "max_positions": target.max_positions}
        facts = {
            "from_scratch": True,
            "steps": result.step,
            "tokens": self._tokens,
            "heldout_own": round(result.own, 4),
            "heldout_modules": round(result.modules, 4),
            "heldout_accepted": list(result.accepted),
            "seed": self._options.seed,
        }
        config = DrafterConfig("deepseek_mtp", model_fingerprint(model), "model", shape, facts)
        save_drafter(self._options.export_dir / "drafter", config, self._joint.module_tensors())

    def _save(self) -> None:
        meta = {"method": METHOD, "tokens": self._tokens, "position": self._position.to_json()}
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        optimizer = flatten_optimizer([self._optimizer], self._parameters)
        save_run(self._options.run_dir, self._step, RunState(weights, {}, optimizer, meta))

    def _restore(self, state: RunState) -> None:
        found = {name: tensor.shape for name, tensor in state.weights.items()}
        if state.meta.get("method") != METHOD or found != {k: p.shape for k, p in self._parameters.items()}:
            raise TrainingDataError(f"{self._options.run_dir} holds another kind of run")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.weights[name])
        restore_optimizer([self._optimizer], self._parameters, state.optimizer)
        self._step, self._tokens = int(state.meta["step"]), int(state.meta["tokens"])
        self._position = DataPosition.from_json(state.meta["position"])
        log.info("resumed", step=self._step, tokens=self._tokens)
