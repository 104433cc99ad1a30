"""Which objective trains which method, and how it is built from a target. Called by the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog
import torch

from paceline.models import model_fingerprint
from paceline.training import eagle1_start
from paceline.training.data import Corpus
from paceline.training.eagle1 import Eagle1Objective
from paceline.training.eagle3 import Eagle3Objective, TargetFacts, choose_draft_vocab
from paceline.training.eagle3_start import default_shape, fit_linear, starting_parameters
from paceline.training.errors import TrainingDataError
from paceline.training.independent import IndependentObjective
from paceline.training.objective import Objective
from paceline.training.p_eagle import PEagleObjective, PEagleShape
from paceline.training.p_eagle_start import mean_taps, p_eagle_start, rarest_token
from paceline.training.teacher import TeacherShape, default_tap_layers, read_weights

if TYPE_CHECKING:
    from paceline.training.trainer import TrainOptions

log = structlog.get_logger()

_FIT_TOKENS = 40_000


def build_objective(options: TrainOptions, corpus: Corpus) -> Objective:
    """The method's objective at its starting point.

    Raises:
        TrainingDataError: an unknown method, or text that another target wrote.
    """
    if options.method not in METHODS:
        raise TrainingDataError(f"method {options.method!r} is none of {', '.join(sorted(METHODS))}")
    fingerprint = model_fingerprint(options.model_dir)
    if corpus.manifest.get("model_fingerprint") != fingerprint:
        raise TrainingDataError(
            f"{corpus.folder} was written by another target than {options.model_dir.name!r}"
        )
    return METHODS[options.method](options, corpus, fingerprint)


def _build_eagle3(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = TeacherShape.from_config(json.loads((options.model_dir / "config.json").read_text()))
    weights = read_weights(options.model_dir)
    taps = default_tap_layers(target.num_layers)
    counts = corpus.count_answer_tokens(target.vocab)
    draft_ids = choose_draft_vocab(counts, options.draft_vocab)
    log.info(
        "draft_vocab",
        size=options.draft_vocab,
        coverage=round(float(counts[draft_ids].sum() / counts.sum()), 4),
    )
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    shape = default_shape(target, len(taps), options.draft_vocab, None)
    start = fit_linear(corpus, embedding, _FIT_TOKENS)
    return Eagle3Objective(
        shape,
        starting_parameters(shape, start, head[draft_ids], options.seed),
        embedding,
        head,
        draft_ids,
        start.tap_scale,
        TargetFacts(fingerprint, options.model_dir.name, taps, target.max_positions),
        test_steps=options.test_steps,
        step_decay=options.step_decay,
        dtype=getattr(torch, options.dtype),
    )


def _build_eagle1(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = TeacherShape.from_config(json.loads((options.model_dir / "config.json").read_text()))
    weights = read_weights(options.model_dir)
    embedding = weights["model.embed_tokens.weight"]
    shape = eagle1_start.default_shape(target)
    start = eagle1_start.fit_next_feature(corpus, embedding, _FIT_TOKENS)
    return Eagle1Objective(
        shape,
        eagle1_start.starting_parameters(shape, start, options.seed),
        embedding,
        weights.get("lm_head.weight", embedding),
        TargetFacts(fingerprint, options.model_dir.name, (), target.max_positions),
        method=options.method,
        feature_weight=options.feature_weight,
        token_weight=options.token_weight,
        token_rows=options.token_rows,
        noise=options.feature_noise,
        dtype=getattr(torch, options.dtype),
    )


def _build_p_eagle(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = TeacherShape.from_config(json.loads((options.model_dir / "config.json").read_text()))
    weights = read_weights(options.model_dir)
    taps = default_tap_layers(target.num_layers)
    counts = corpus.count_answer_tokens(target.vocab)
    draft_ids = choose_draft_vocab(counts, options.draft_vocab)
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    shape = PEagleShape(
        **asdict(default_shape(target, len(taps), options.draft_vocab, None)),
        num_layers=options.num_layers,
        num_depths=options.num_depths,
        mask_token=rarest_token(counts, embedding),
    )
    log.info(
        "p_eagle",
        draft_vocab=options.draft_vocab,
        coverage=round(float(counts[draft_ids].sum() / counts.sum()), 4),
        mask_token=shape.mask_token,
    )
    start = fit_linear(corpus, embedding, _FIT_TOKENS)
    return PEagleObjective(
        shape,
        p_eagle_start(shape, start, mean_taps(corpus), head[draft_ids], embedding, options.seed),
        head,
        draft_ids,
        start.tap_scale,
        TargetFacts(fingerprint, options.model_dir.name, taps, target.max_positions),
        keep_ratio=options.keep_ratio,
        keep_floor=options.keep_floor,
        num_segments=options.num_segments,
        dtype=getattr(torch, options.dtype),
    )


def _build_independent(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    return IndependentObjective.cut_from_target(
        options.model_dir,
        options.num_layers,
        TargetFacts(fingerprint, options.model_dir.name, (), 0),
        getattr(torch, options.dtype),
    )


METHODS: dict[str, Callable[[TrainOptions, Corpus, str], Objective]] = {
    "eagle1": _build_eagle1,
    "eagle2": _build_eagle1,
    "eagle3": _build_eagle3,
    "independent": _build_independent,
    "p_eagle": _build_p_eagle,
}

GRADIENT_LIMITS = {"eagle1": 0.5, "eagle2": 0.5}
"""Largest entry of a gradient, for methods whose authors cut entries."""
