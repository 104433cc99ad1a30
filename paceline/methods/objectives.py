"""Which objective trains which method, and how it is built from a target. Called by the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import Tensor

from paceline.contract.errors import TrainingDataError
from paceline.methods.deepseek_mtp import start as deepseek_mtp_start
from paceline.methods.deepseek_mtp.objective import DeepseekMtpObjective
from paceline.methods.dflash.objective import DFlashObjective, DFlashShape
from paceline.methods.dflash.start import random_parameters, tap_scale
from paceline.methods.dspark.heads import HeadPlan, MarkovHead
from paceline.methods.dspark.objective import DSparkObjective, LossShares
from paceline.methods.eagle1 import start as eagle1_start
from paceline.methods.eagle1.objective import Eagle1Objective
from paceline.methods.eagle3.objective import Eagle3Objective
from paceline.methods.eagle3.start import default_shape, fit_linear
from paceline.methods.eagle3.start import starting_parameters as eagle3_parameters
from paceline.methods.gemma4_mtp import start as gemma4_mtp_start
from paceline.methods.gemma4_mtp.objective import Gemma4MtpObjective, TargetTables
from paceline.methods.gemma4_mtp.token_clusters import check_clusters
from paceline.methods.independent.objective import IndependentObjective, cut_model
from paceline.methods.medusa1.objective import Medusa1Objective
from paceline.methods.medusa2.objective import JointSettings, Medusa2Objective
from paceline.methods.medusa2.tuned_backbone import LoraSettings, TunedBackbone
from paceline.methods.medusa_heads.heads import MAX_HEADS, MedusaShape, OutputHead
from paceline.methods.medusa_heads.training import HeadStack, fit_look_ahead, starting_parameters
from paceline.methods.p_eagle.objective import PEagleObjective, PEagleShape
from paceline.methods.p_eagle.start import mean_taps, p_eagle_start, rarest_token
from paceline.methods.pard1.objective import Pard1Objective
from paceline.methods.pard1.start import mask_token_for
from paceline.methods.pard2.objective import FeatureSettings, Pard2Objective, rms_features
from paceline.models import model_fingerprint
from paceline.target import TapSpec
from paceline.training.configuration import parse_configuration, read_config_json, text_part
from paceline.training.data import Corpus
from paceline.training.draft_vocabulary import choose_draft_vocab
from paceline.training.objective import Objective, TargetReference
from paceline.training.shards import shard_indices
from paceline.training.sizes import ModelSizes
from paceline.training.target_rows import TargetRows
from paceline.training.target_weights import (
    EMBEDDING,
    check_target_tensors,
    read_embedding_and_head,
    read_final_norm,
)
from paceline.training.teacher import default_tap_layers, read_weights

if TYPE_CHECKING:
    from paceline.training.trainer import TrainOptions

log = structlog.get_logger()

_FIT_TOKENS = 40_000

_KEEP_FLOORS = {"pard1": 0.2, "pard2": 0.1}
"""Least shares of rows at any depth, as the authors' recipes have them."""


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
    target = ModelSizes.read(options.model_dir)
    embedding, head = read_embedding_and_head(options.model_dir)
    taps = default_tap_layers(target.num_layers)
    counts = corpus.count_answer_tokens(target.vocab)
    draft_ids = choose_draft_vocab(counts, options.draft_vocab)
    log.info(
        "draft_vocab",
        size=options.draft_vocab,
        coverage=round(float(counts[draft_ids].sum() / counts.sum()), 4),
    )
    shape = default_shape(target, len(taps), options.draft_vocab, None)
    start = fit_linear(corpus, embedding, _FIT_TOKENS)
    return Eagle3Objective(
        shape,
        eagle3_parameters(shape, start, head[draft_ids], options.seed),
        embedding,
        head,
        draft_ids,
        start.tap_scale,
        TargetReference(fingerprint, options.model_dir.name, taps, target.max_positions),
        test_steps=options.test_steps,
        step_decay=options.step_decay,
        dtype=getattr(torch, options.dtype),
    )


def _draft_part(options: TrainOptions, corpus: Corpus, vocab: int) -> Tensor | None:
    """The tokens that are proposed, the most frequent of the text's answers; None for all."""
    if options.draft_vocab in (0, vocab):
        return None
    counts = corpus.count_answer_tokens(vocab)
    draft_ids = choose_draft_vocab(counts, options.draft_vocab)
    coverage = round(float(counts[draft_ids].sum() / counts.sum()), 4)
    log.info("draft_vocab", size=options.draft_vocab, coverage=coverage)
    return draft_ids


def _build_eagle1(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    embedding, head = read_embedding_and_head(options.model_dir)
    shape = eagle1_start.default_shape(target)
    start = eagle1_start.fit_next_feature(corpus, embedding, _FIT_TOKENS)
    return Eagle1Objective(
        shape,
        eagle1_start.starting_parameters(shape, start, options.seed),
        embedding,
        head,
        TargetReference(fingerprint, options.model_dir.name, (), target.max_positions),
        method=options.method,
        feature_weight=options.feature_weight,
        token_weight=options.token_weight,
        token_rows=options.token_rows,
        noise=options.feature_noise,
        draft_ids=_draft_part(options, corpus, target.vocab),
        dtype=getattr(torch, options.dtype),
    )


def _build_deepseek_mtp(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    embedding, head = read_embedding_and_head(options.model_dir)
    final_norm = read_final_norm(options.model_dir, target.norm_offset)
    shape = deepseek_mtp_start.default_shape(target, options.num_modules)
    start = deepseek_mtp_start.fit_projection(corpus, embedding, final_norm, shape.rms_eps, _FIT_TOKENS)
    return DeepseekMtpObjective(
        shape,
        deepseek_mtp_start.starting_parameters(shape, start, options.seed),
        embedding,
        head,
        TargetReference(fingerprint, options.model_dir.name, (), target.max_positions),
        steps=options.test_steps,
        step_decay=options.step_decay,
        loss=options.depth_loss,
        token_rows=options.token_rows,
        draft_ids=_draft_part(options, corpus, target.vocab),
        dtype=getattr(torch, options.dtype),
    )


def _build_gemma4_mtp(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    dtype = getattr(torch, options.dtype)
    text = text_part(parse_configuration(read_config_json(options.model_dir)))
    shape, cached = gemma4_mtp_start.default_shape(
        text, options.num_layers, options.draft_hidden, options.draft_intermediate
    )
    check_clusters(shape.vocab, options.num_clusters, options.num_selected)
    embedding, head = read_embedding_and_head(options.model_dir)
    is_gemma = str(text.model_type).startswith("gemma")
    tables = TargetTables(
        embedding,
        shape.backbone**0.5 if is_gemma else 1.0,
        head,
        TargetRows(options.model_dir, TapSpec(norm_final=True, cached=tuple(cached.values())), dtype),
    )
    start, scale = gemma4_mtp_start.starting_parameters(shape, tables, corpus, _FIT_TOKENS, options.seed)
    return Gemma4MtpObjective(
        shape,
        cached,
        start,
        tables,
        TargetReference(fingerprint, options.model_dir.name, (), int(text.max_position_embeddings)),
        input_scale=scale,
        steps=options.test_steps,
        step_decay=options.step_decay,
        loss=options.depth_loss,
        token_rows=options.token_rows,
        num_clusters=options.num_clusters,
        num_selected=options.num_selected,
        dtype=dtype,
    )


def _build_p_eagle(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    embedding, head = read_embedding_and_head(options.model_dir)
    taps = default_tap_layers(target.num_layers)
    counts = corpus.count_answer_tokens(target.vocab)
    draft_ids = choose_draft_vocab(counts, options.draft_vocab)
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
        TargetReference(fingerprint, options.model_dir.name, taps, target.max_positions),
        keep_ratio=options.keep_ratio,
        keep_floor=options.keep_floor or 0.0,
        num_segments=options.num_segments,
        dtype=getattr(torch, options.dtype),
    )


def _build_dflash(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    embedding, head = read_embedding_and_head(options.model_dir)
    taps = default_tap_layers(target.num_layers)
    counts = corpus.count_answer_tokens(target.vocab)
    size = options.draft_vocab or target.vocab
    draft_ids = choose_draft_vocab(counts, size)
    shape = DFlashShape(
        **asdict(default_shape(target, len(taps), size, None)),
        num_layers=options.num_layers,
        block_size=options.block_size,
        mask_token=rarest_token(counts, embedding),
        anchor_first=options.block_layout == "anchor_first"
        or (options.block_layout == "published" and options.method == "dspark"),
    )
    if not shape.num_drafts:
        raise TrainingDataError("block_size 1 leaves nothing to draft")
    log.info(
        options.method,
        draft_vocab=size,
        coverage=round(float(counts[draft_ids].sum() / counts.sum()), 4),
        mask_token=shape.mask_token,
    )
    shared = (embedding, head, draft_ids, tap_scale(corpus))
    facts = TargetReference(fingerprint, options.model_dir.name, taps, target.max_positions)
    dtype = getattr(torch, options.dtype)
    shapes = shape.parameter_shapes()
    if options.method == "dflash":
        start = random_parameters(shapes, options.seed)
        return DFlashObjective(shape, start, *shared, facts, options.num_anchors, options.block_decay, dtype)
    heads = HeadPlan(MarkovHead(options.markov_head), options.markov_rank)
    shapes |= heads.parameter_shapes(shape.hidden, shape.target_vocab, size)
    return DSparkObjective(
        shape,
        heads,
        random_parameters(shapes, options.seed),
        *shared,
        facts,
        num_anchors=options.num_anchors,
        decay=options.block_decay,
        shares=LossShares(options.token_share, options.distance_share, options.confidence_share),
        dtype=dtype,
    )


def _build_independent(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    vocab = ModelSizes.read(options.model_dir).vocab
    return IndependentObjective.cut_from_target(
        options.model_dir,
        options.num_layers,
        TargetReference(fingerprint, options.model_dir.name, (), 0),
        getattr(torch, options.dtype),
        _draft_part(options, corpus, vocab),
    )


def _build_pard(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    if options.start_dir is None:
        config, weights = cut_model(options.model_dir, options.num_layers)
    else:
        config = read_config_json(options.start_dir)
        check_target_tensors(options.start_dir)
        weights = read_weights(options.start_dir)
    if (vocab := ModelSizes.from_config(config).vocab) != target.vocab:
        raise TrainingDataError(
            f"start_dir has {vocab} tokens and the target {target.vocab}: they must share a tokenizer"
        )
    counts = corpus.count_answer_tokens(target.vocab)
    mask = mask_token_for(options.model_dir, counts, weights[EMBEDDING])
    draft_ids = choose_draft_vocab(counts, options.draft_vocab) if options.draft_vocab else None
    log.info("pard", mask_token=mask, draft_vocab=options.draft_vocab or target.vocab)
    floor = _KEEP_FLOORS[options.method] if options.keep_floor is None else options.keep_floor
    common: dict[str, Any] = {
        "mask_token": mask,
        "draft_ids": draft_ids,
        "num_depths": options.num_depths,
        "keep_ratio": options.keep_ratio,
        "keep_floor": floor,
        "dtype": getattr(torch, options.dtype),
        "tokenizer_dir": options.model_dir,
    }
    taps = default_tap_layers(target.num_layers)
    facts = TargetReference(fingerprint, options.model_dir.name, taps, target.max_positions)
    if options.method == "pard1":
        return Pard1Objective(config, weights, facts, **common)
    some = corpus.epoch(0, shard_indices(corpus.folder)[:1])
    _, head = read_embedding_and_head(options.model_dir)
    return Pard2Objective(
        config,
        weights,
        facts,
        head,
        rms_features(list(islice(some, 8))),
        FeatureSettings(drop=options.feature_drop, label_weight=options.token_weight),
        options.seed,
        **common,
    )


def _build_medusa1(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    target = ModelSizes.read(options.model_dir)
    facts = TargetReference(fingerprint, options.model_dir.name, (), target.max_positions)
    heads = _medusa_heads(options, corpus, target)
    return Medusa1Objective(heads, facts, options.step_decay)


def _medusa_heads(options: TrainOptions, corpus: Corpus, target: ModelSizes) -> HeadStack:
    if options.num_heads > MAX_HEADS:
        raise TrainingDataError(f"num_heads must be at most {MAX_HEADS}")
    _, head = read_embedding_and_head(options.model_dir)
    size = min(options.draft_vocab, target.vocab)
    counts = corpus.count_answer_tokens(target.vocab)
    draft_ids = choose_draft_vocab(counts, size)
    log.info("draft_vocab", size=size, coverage=round(float(counts[draft_ids].sum() / counts.sum()), 4))
    shape = MedusaShape(
        hidden=target.hidden,
        target_vocab=target.vocab,
        draft_vocab=size,
        num_heads=options.num_heads,
        output=OutputHead(options.output),
    )
    parameters = starting_parameters(shape, head[draft_ids], options.seed)
    if shape.output is OutputHead.OWN and options.head_start == "linear":
        for k, ahead in enumerate(fit_look_ahead(corpus, shape.num_heads, _FIT_TOKENS)):
            parameters[f"lm_heads.{k}.weight"] = parameters[f"lm_heads.{k}.weight"] @ ahead
    return HeadStack(shape, parameters, head, draft_ids, getattr(torch, options.dtype))


def _build_medusa2(options: TrainOptions, corpus: Corpus, fingerprint: str) -> Objective:
    settings = LoraSettings(options.lora_rank, options.lora_alpha, options.lora_dropout)
    backbone = TunedBackbone(options.model_dir, settings, options.seed, getattr(torch, options.dtype))
    facts = TargetReference(fingerprint, options.model_dir.name, (), backbone.shape.max_positions)
    sizes = ModelSizes.read(options.model_dir)
    heads = _medusa_heads(options, corpus, sizes)
    joint = JointSettings(
        decay=options.step_decay,
        coefficient=options.heads_coefficient,
        schedule=options.heads_schedule,
        heads_first=options.heads_first,
        base_loss=options.base_loss,
        base_rows=options.token_rows,
        max_loss_increase=options.max_loss_increase,
    )
    return Medusa2Objective(heads, backbone, facts, joint)


METHODS: dict[str, Callable[[TrainOptions, Corpus, str], Objective]] = {
    "deepseek_mtp": _build_deepseek_mtp,
    "dflash": _build_dflash,
    "dspark": _build_dflash,
    "eagle1": _build_eagle1,
    "eagle2": _build_eagle1,
    "eagle3": _build_eagle3,
    "gemma4_mtp": _build_gemma4_mtp,
    "independent": _build_independent,
    "medusa1": _build_medusa1,
    "medusa2": _build_medusa2,
    "p_eagle": _build_p_eagle,
    "pard1": _build_pard,
    "pard2": _build_pard,
}

GRADIENT_LIMITS = {"eagle1": 0.5, "eagle2": 0.5}
"""Largest entry of a gradient, for methods whose authors cut entries."""
