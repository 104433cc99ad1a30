"""DSpark serving: chains, trees and draws against the published rule, token by token without cache or batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.drafts import DraftEntry, DrawRule
from paceline.methods.checkpoint import CheckpointError, DrafterConfig, save_drafter
from paceline.methods.drafter import Drafter, DraftRequest, OutcomeRequest
from paceline.methods.dspark.drafter import DSparkDrafter
from paceline.methods.dspark.heads import HeadPlan, MarkovHead
from paceline.methods.loading import load_drafter
from paceline.sampling.distribution import DraftDistribution
from paceline.sampling.params import SamplingParams, VerifyMode
from tests.methods.conftest import (
    DRAFT_IDS,
    DSPARK_HEADS,
    DSPARK_SHAPE,
    VOCAB,
    Target,
    dspark_tensors,
    save_dspark,
    text,
)
from tests.methods.dflash_checkpoint import reference_states

Load = Callable[[Path], Drafter]
RANK = 8
PLANS = {
    "vanilla": DSPARK_HEADS,
    "gated": HeadPlan(MarkovHead.GATED, RANK),
    "rnn": HeadPlan(MarkovHead.RNN, RANK),
    "confidence of the row alone": HeadPlan(MarkovHead.VANILLA, RANK, confidence_reads_token=False),
    "no confidence": HeadPlan(MarkovHead.VANILLA, RANK, has_confidence=False),
    "scaled confidence": HeadPlan(MarkovHead.VANILLA, RANK, temperatures=(3.0, 0.5, 2.0)),
}


class Reference:
    """What the drafter should say of a path behind a text."""

    def __init__(self, plan: HeadPlan, target: Target, embedding: Tensor, tokens: list[int]) -> None:
        self._plan, self._anchor = plan, tokens[-1]
        self._w = dspark_tensors(plan)
        taps = target.taps(tokens)[:-1]
        self._states = reference_states(DSPARK_SHAPE, self._w, embedding, taps, tokens)
        self._logits = self._states @ embedding[DRAFT_IDS].T

    def behind(self, path: list[int]) -> tuple[Tensor, float]:
        """Logits over draft ids of the token behind a path, and the confidence in it."""
        w, s = self._w, torch.zeros(RANK)
        for k, token in enumerate([self._anchor, *path]):
            h, x = self._states[k], w["markov_head.markov_w1.weight"][token]
            m = x
            if self._plan.markov is MarkovHead.GATED:
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, x])
                m = torch.sigmoid(gate + w["markov_head.gate_proj.bias"]) * x
            if self._plan.markov is MarkovHead.RNN:
                z = w["markov_head.joint_proj.weight"] @ torch.cat([s, x, h])
                g, c, o = (z + w["markov_head.joint_proj.bias"]).split(RANK)
                s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
                m = torch.tanh(o)
        logits = self._logits[len(path)] + w["markov_head.markov_w2.weight"] @ m
        if not self._plan.has_confidence:
            return logits, math.nan
        read = torch.cat([h, x]) if self._plan.confidence_reads_token else h
        logit = w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0]
        scale = (*self._plan.temperatures, *self._plan.temperatures[-1:] * 7)[len(path) :]
        return logits, float(torch.sigmoid(logit / scale[0] if scale else logit))


@pytest.fixture(scope="module")
def embedding(target_dir: Path) -> Tensor:
    """The target's, which is its head too."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    return model.model.embed_tokens.weight.detach()


@pytest.fixture
def drafter(load: Load, dspark_dir: Path) -> Drafter:
    return load(dspark_dir)


def _start(drafter: Drafter, target: Target, sequence_id: int, tokens: list[int]) -> None:
    drafter.open(sequence_id, tokens)
    drafter.feed(sequence_id, 0, target.features(drafter, tokens)[:-1])


def _entry(drafter: Drafter, sequence_id: int, num_tokens: int, **wish: object) -> DraftEntry:
    (entry,) = drafter.draft([DraftRequest(sequence_id, num_tokens, **wish)])  # type: ignore[arg-type]
    assert entry is not None
    return entry


def _paths(entry: DraftEntry) -> list[list[int]]:
    """The tokens above each node."""
    paths: list[list[int]] = []
    for parent in entry.parents:
        paths.append([] if parent < 0 else [*paths[parent], entry.tokens[parent]])
    return paths


@pytest.mark.parametrize("kind", PLANS)
def test_chain_equals_reference(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, kind: str
) -> None:
    plan = PLANS[kind]
    drafter = load(save_dspark(tmp_path, target_dir, plan))
    tokens = text(17, seed=3)
    _start(drafter, target, 1, tokens)
    entry = _entry(drafter, 1, 9)
    reference = Reference(plan, target, embedding, tokens)
    assert len(entry.tokens) == 7
    for k, token in enumerate(entry.tokens):
        logits, confidence = reference.behind(list(entry.tokens[:k]))
        assert token == DRAFT_IDS[int(logits.argmax())]
        expected = math.log(confidence) if plan.has_confidence else float(logits.log_softmax(-1).max())
        assert entry.log_probs[k] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    base = [DRAFT_IDS[i] for i in reference._logits.argmax(-1).tolist()]
    assert kind == "gated" or list(entry.tokens) != base  # the Markov head decides; a gate weakens it


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("max_nodes", [20, 40])
def test_every_node_of_a_tree_is_likely_behind_its_own_path(
    load: Load, target: Target, target_dir: Path, embedding: Tensor, tmp_path: Path, kind: str, max_nodes: int
) -> None:
    plan = PLANS[kind]
    drafter = load(save_dspark(tmp_path, target_dir, plan))
    tokens = text(17, seed=3)
    _start(drafter, target, 1, tokens)
    entry = _entry(drafter, 1, 4, max_nodes=max_nodes)
    entry.check(max_tokens=max_nodes, vocab_size=VOCAB)
    assert len(entry.tokens) == max_nodes
    reference = Reference(plan, target, embedding, tokens)
    siblings: dict[tuple[int, ...], list[int]] = {}
    for node, path in enumerate(_paths(entry)):
        log_probs = reference.behind(path)[0].log_softmax(-1)
        expected = float(log_probs[DRAFT_IDS.index(entry.tokens[node])])
        assert entry.log_probs[node] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        siblings.setdefault(tuple(path), []).append(entry.tokens[node])
    assert max(len(path) for path in siblings) > 1
    for path, children in siblings.items():
        best = reference.behind(list(path))[0].topk(len(children)).indices.tolist()
        assert sorted(children) == sorted(DRAFT_IDS[i] for i in best)


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
@pytest.mark.parametrize("rule", [None, DrawRule.WITH_REPLACEMENT])
def test_what_is_sent_along_is_the_distribution_given_what_was_drawn(
    drafter: Drafter, target: Target, embedding: Tensor, mode: VerifyMode, rule: DrawRule | None
) -> None:
    """The condition for exactness: each draw's distribution is that of its row, given the draws before it."""
    tokens = text(14, seed=2)
    _start(drafter, target, 1, tokens)
    sampling = SamplingParams(temperature=1.0, seed=8, mode=mode)
    entry = _entry(drafter, 1, 4, max_nodes=7, sampling=sampling, rule=rule)
    reference = Reference(DSPARK_HEADS, target, embedding, tokens)
    assert entry.draft_dists is not None
    for node, path in enumerate(_paths(entry)):
        draws = entry.draft_dists[node]
        assert draws is not None
        assert isinstance(draws.distribution, DraftDistribution)
        logits, confidence = reference.behind(path)
        assert draws.confidence == pytest.approx(confidence, abs=1e-3)
        probs = logits.softmax(-1)
        for i, prob in enumerate(probs.tolist()):
            assert draws.distribution.prob(DRAFT_IDS[i]) == pytest.approx(prob, abs=2e-3)


def test_batched_equals_single_whatever_is_wished(load: Load, dspark_dir: Path, target: Target) -> None:
    wishes = [
        DraftRequest(1, 6),
        DraftRequest(2, 2),
        DraftRequest(3, 4, max_nodes=11),
        DraftRequest(4, 5, sampling=SamplingParams(temperature=1.0, seed=3)),
        DraftRequest(5, 3, sampling=SamplingParams(temperature=1.0, seed=3, mode=VerifyMode.REJECTION)),
        DraftRequest(6, 5, max_nodes=17, sampling=SamplingParams(temperature=1.0, seed=4)),
    ]
    together = load(dspark_dir)
    alone = []
    for i, wish in enumerate(wishes):
        one = load(dspark_dir)
        for drafter in (one, together):
            _start(drafter, target, wish.sequence_id, text(5 + 4 * i, seed=i))
        alone += one.draft([wish])
    for ours, theirs in zip(together.draft(wishes), alone, strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.start, ours.tokens, ours.parents) == (theirs.start, theirs.tokens, theirs.parents)


@pytest.mark.parametrize("markov", list(MarkovHead))
def test_a_longer_wish_goes_on_from_the_chain(
    load: Load, target: Target, target_dir: Path, tmp_path: Path, markov: MarkovHead
) -> None:
    path = save_dspark(tmp_path, target_dir, HeadPlan(markov, RANK))
    drafter, fresh = load(path), load(path)
    for one in (drafter, fresh):
        _start(one, target, 1, text(9, seed=4))
    first = _entry(drafter, 1, 3).tokens
    _entry(drafter, 1, 3, max_nodes=9)  # a tree in between changes nothing
    longer = _entry(drafter, 1, 7).tokens
    assert longer[:3] == first
    assert longer == _entry(fresh, 1, 7).tokens
    assert _entry(drafter, 1, 2).tokens == first[:2]


@pytest.mark.parametrize("num_accepted", [0, 2, 5])
@pytest.mark.parametrize("max_nodes", [0, 11])
def test_after_a_verification_equals_a_fresh_drafter(
    load: Load, dspark_dir: Path, target: Target, num_accepted: int, max_nodes: int
) -> None:
    tokens = text(11, seed=8)
    drafter, fresh = load(dspark_dir), load(dspark_dir)
    _start(drafter, target, 1, tokens)
    drafted = list(_entry(drafter, 1, 5, max_nodes=max_nodes).tokens)
    final = next(t for t in range(3, VOCAB) if t not in drafted)
    whole = [*tokens, *drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), whole[len(tokens) :])
    assert drafter.draft([DraftRequest(1, 5)]) == [None]  # its features are still on the way
    features = target.features(drafter, whole)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : len(whole) - 1])
    _start(fresh, target, 1, whole)
    ours, theirs = (_entry(d, 1, 5, max_nodes=max_nodes) for d in (drafter, fresh))
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)


def test_out_of_positions_and_outcomes(drafter: Drafter, target: Target) -> None:
    tokens = text(59, seed=6)
    _start(drafter, target, 1, tokens[:58])
    assert len(_entry(drafter, 1, 7).tokens) == 7
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 30)]) == [None]
    _start(drafter, target, 2, tokens)
    assert drafter.draft([DraftRequest(2, 1)]) == [None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"markov_head": "deep"}, "markov_head 'deep' is none of"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"confidence_head": False}, r"confidence_head\.proj\.bias is surplus"),
        ({"confidence_reads_token": False}, r"confidence_head\.proj\.weight has shape"),
        ({"markov_head": "gated"}, r"markov_head\.gate_proj\.bias is missing"),
        ({"confidence_temperatures": [1.0, 0]}, "confidence_temperatures must be"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    dspark_dir: Path, target_dir: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    config = DrafterConfig.read(dspark_dir)
    save_drafter(tmp_path, replace(config, shape={**config.shape, **change}), dspark_tensors(DSPARK_HEADS))
    with pytest.raises(CheckpointError, match=said):
        load_drafter(tmp_path, target_dir)


def test_it_is_the_class_that_is_meant(drafter: Drafter) -> None:
    assert isinstance(drafter, DSparkDrafter)
    assert drafter.longest_draft == 7
