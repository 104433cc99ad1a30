"""What holds for every method that drafts all tokens in one pass: its rounds, its trees, its race and its draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafts import DrawRule
from paceline.methods.choice import choose_chain_tokens
from paceline.methods.dflash.drafter import DFlashDrafter
from paceline.methods.drafter import Drafter, DrafterError, DraftRequest, OutcomeRequest
from paceline.methods.one_pass.round import OnePassRound
from paceline.methods.p_eagle.drafter import PEagleDrafter
from paceline.methods.pard.drafter import PardDrafter
from paceline.sampling.params import SamplingParams, VerifyMode
from tests.methods.conftest import DRAFT_IDS, VOCAB, Target, text
from tests.methods.drafting import draft, entry_of, start
from tests.methods.pard_checkpoint import MASK_TOKEN

Load = Callable[[Path], Drafter]
METHODS = ("dflash", "p_eagle", "pard1", "pard2")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def new(load: Load, drafter_dirs: dict[str, Path], method: str) -> Callable[[], Drafter]:
    return lambda: load(drafter_dirs[method])


@pytest.fixture
def drafter(new: Callable[[], Drafter]) -> Drafter:
    return new()


@pytest.fixture
def ids(method: str) -> Tensor:
    """Target ids of the drafted vocabulary, in the order of logits."""
    return torch.arange(VOCAB) if method.startswith("pard") else torch.tensor(DRAFT_IDS)


def round_of(drafter: Drafter, sequence_id: int) -> OnePassRound:
    assert isinstance(drafter, DFlashDrafter | PEagleDrafter | PardDrafter)
    found = drafter._sequences[sequence_id].round
    assert isinstance(found, OnePassRound)
    return found


def runner_of(drafter: Drafter) -> tuple[Any, str]:
    """What is called once for a pass."""
    if isinstance(drafter, DFlashDrafter):
        return drafter._blocks, "forward"
    if isinstance(drafter, PEagleDrafter):
        return drafter._layer, "forward"
    assert isinstance(drafter, PardDrafter)
    return drafter._model, "step"


def count_passes(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for every pass from now on."""
    passes: list[int] = []
    owner, name = runner_of(drafter)
    run = getattr(owner, name)

    def counting(*given: Any) -> Any:
        passes.append(1)
        return run(*given)

    monkeypatch.setattr(owner, name, counting)
    return passes


def test_batched_equals_single(
    new: Callable[[], Drafter], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {1: text(5, 1), 2: text(17, 2), 3: text(30, 3)}
    lengths = {1: 6, 2: 2, 3: 4}
    single = {}
    for key, tokens in texts.items():
        alone = new()
        start(alone, target, key, tokens)
        single[key] = draft(alone, key, lengths[key])
    together = new()
    for key, tokens in texts.items():
        start(together, target, key, tokens)
    passes = count_passes(together, monkeypatch)
    entries = together.draft([DraftRequest(key, lengths[key]) for key in texts])
    assert [entry.tokens for entry in entries if entry is not None] == list(single.values())
    assert [entry.start for entry in entries if entry is not None] == [5, 17, 30]
    assert len(passes) == 1


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
@pytest.mark.parametrize("max_nodes", [0, 11])
def test_after_a_verification_equals_a_fresh_drafter(
    new: Callable[[], Drafter], target: Target, method: str, num_accepted: int, max_nodes: int
) -> None:
    tokens = text(11, seed=8)
    drafter = new()
    start(drafter, target, 1, tokens)
    drafted = list(draft(drafter, 1, 5, max_nodes=max_nodes))
    final = next(t for t in range(6, VOCAB) if t not in drafted)
    committed = [*drafted[:num_accepted], final]
    drafter.extend(1, len(tokens), committed)
    if method != "pard1":
        assert drafter.draft([DraftRequest(1, 5)]) == [None]  # its features are still on the way
    whole = [*tokens, *committed]
    features = target.features(drafter, whole)
    drafter.feed(1, len(tokens) - 1, features[len(tokens) - 1 : len(whole) - 1])
    fresh = new()
    start(fresh, target, 1, whole)
    ours, theirs = (entry_of(d, 1, 5, max_nodes=max_nodes) for d in (drafter, fresh))
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)


@pytest.mark.parametrize("order", list(itertools.permutations(["feed", "extend", "draft"])), ids="-".join)
def test_feed_and_extend_in_any_order(
    new: Callable[[], Drafter], target: Target, order: tuple[str, ...]
) -> None:
    tokens = text(24, seed=12)
    drafter, fresh = new(), new()
    features = target.features(drafter, tokens)
    drafter.open(1, tokens[:8])
    fed = 0
    for end in (12, 13, 19, 24):
        for step in order:
            if step == "feed":
                until = end - 1 + (end < 24)  # one more than the tokens allow
                drafter.feed(1, fed, features[fed:until])
                fed = until
            elif step == "extend":
                drafter.extend(1, min(8, end), tokens[8:end])
            else:
                drafter.draft([DraftRequest(1, 4, 9)])
    start(fresh, target, 1, tokens)
    assert draft(drafter, 1, 6) == draft(fresh, 1, 6)


def test_a_longer_wish_goes_on_and_a_shorter_one_runs_nothing(
    new: Callable[[], Drafter], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, fresh = new(), new()
    for one in (drafter, fresh):
        start(one, target, 1, text(9, seed=4))
    first = draft(drafter, 1, 3)
    longer = draft(drafter, 1, 6)
    assert longer == draft(fresh, 1, 6)
    assert longer[:3] == first
    passes = count_passes(drafter, monkeypatch)
    assert draft(drafter, 1, 2) == first[:2]
    assert not passes


@pytest.mark.parametrize("method", ["dflash", "p_eagle"])
def test_no_more_tokens_than_the_longest_draft(drafter: Drafter, target: Target) -> None:
    longest = drafter.longest_draft
    assert longest is not None
    start(drafter, target, 1, text(9, seed=4))
    assert len(draft(drafter, 1, longest + 4)) == longest
    entry = entry_of(drafter, 1, longest + 4, max_nodes=longest + 4)
    assert len(entry.tokens) == longest + 4  # the wish was for as many nodes
    depths: list[int] = []
    for parent in entry.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) <= longest


def test_a_sequence_that_is_closed_and_opened_again_starts_anew(
    new: Callable[[], Drafter], target: Target
) -> None:
    drafter, fresh = new(), new()
    start(drafter, target, 1, text(30, seed=4))
    draft(drafter, 1, 6)
    drafter.close(1)
    for one in (drafter, fresh):
        start(one, target, 1, text(9, seed=5))
    assert draft(drafter, 1, 6) == draft(fresh, 1, 6)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "pard1"])
def test_what_is_missing_is_named(drafter: Drafter, target: Target) -> None:
    tokens = text(12, seed=6)
    features = target.features(drafter, tokens)
    drafter.open(1, tokens)
    drafter.feed(1, 0, features[:6])
    with pytest.raises(DrafterError, match="features from 6 to 8 are missing"):
        drafter.feed(1, 9, features[9:])
    with pytest.raises(DrafterError, match="tokens 12 to 12 are missing"):
        drafter.extend(1, 13, [6])
    with pytest.raises(DrafterError, match=r"\[n, 64\]"):
        drafter.feed(1, 6, features[6:, :-1])
    with pytest.raises(DrafterError, match="not open"):
        drafter.draft([DraftRequest(2, 3)])


def test_a_pass_that_fails_takes_nothing_away(new: Callable[[], Drafter], target: Target) -> None:
    drafter, fresh = new(), new()
    for sequence_id in (1, 2):
        start(drafter, target, sequence_id, text(9, seed=sequence_id))
        start(fresh, target, sequence_id, text(9, seed=sequence_id))
    draft(drafter, 1, 2)
    owner, name = runner_of(drafter)
    run = getattr(owner, name)

    def failing(*given: Any) -> None:
        run(*given)
        raise RuntimeError("another sequence's fault")

    setattr(owner, name, failing)
    wishes = [DraftRequest(1, 7), DraftRequest(2, 5)]
    with pytest.raises(RuntimeError):
        drafter.draft(wishes)
    setattr(owner, name, run)
    for sequence_id in (1, 2):
        assert draft(drafter, sequence_id, 5) == draft(fresh, sequence_id, 5)


def test_outcomes_are_not_drafted_past(drafter: Drafter, target: Target) -> None:
    start(drafter, target, 1, text(9, seed=4))
    draft(drafter, 1, 3, max_nodes=9)
    assert drafter.draft_outcomes([OutcomeRequest(1, 3, 4, 30)]) == [None]


@pytest.mark.parametrize("max_nodes", [7, 16, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tree_holds_the_likeliest_products(
    drafter: Drafter, target: Target, method: str, ids: Tensor, max_nodes: int, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    start(drafter, target, 1, text(16, seed=9))
    entry = entry_of(drafter, 1, 4, max_nodes=max_nodes, sampling=sampling)
    entry.check(max_tokens=max_nodes, vocab_size=VOCAB)
    assert len(entry.tokens) == max_nodes
    assert len(set(zip(entry.parents, entry.tokens, strict=True))) == max_nodes
    assert draft(drafter, 1, 4, sampling=sampling)[0] == entry.tokens[0]
    never = {MASK_TOKEN} if method.startswith("pard") else set()
    assert set(entry.tokens) <= set(ids.tolist()) - never


def test_coupled_chain_runs_the_race_at_every_depth(drafter: Drafter, target: Target, ids: Tensor) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    start(drafter, target, 1, text(14, seed=2))
    drafted = draft(drafter, 1, 6, sampling=sampling)
    logits = round_of(drafter, 1).logits(0, 6)
    for depth in range(6):
        chosen, _ = choose_chain_tokens(logits[depth : depth + 1], ids, [14 + depth], [sampling])
        assert drafted[depth] == int(chosen)
    assert drafted != tuple(ids[logits.argmax(-1)].tolist())


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
@pytest.mark.parametrize("rule", [None, DrawRule.WITH_REPLACEMENT])
def test_draws_come_from_what_is_sent_along(
    drafter: Drafter, target: Target, ids: Tensor, mode: VerifyMode, rule: DrawRule | None
) -> None:
    """Over many seeds every depth's first draw follows that depth's own distribution."""
    start(drafter, target, 1, text(14, seed=2))
    draft(drafter, 1, 3)
    current = round_of(drafter, 1)
    seen = torch.zeros(3, VOCAB)
    for seed in range(400):
        current.tokens.clear()
        current.draws.clear()
        sampling = SamplingParams(temperature=1.0, seed=seed, mode=mode)
        entry = entry_of(drafter, 1, 3, max_nodes=6, sampling=sampling, rule=rule)
        assert entry.draft_dists is not None
        chain = [
            entry.draft_dists[i]
            for i, parent in enumerate(entry.parents)
            if i == 0 or parent != entry.parents[i - 1]
        ]
        for depth, siblings in enumerate(chain):
            assert siblings is not None
            seen[depth, siblings.tokens[0]] += 1
    expected = torch.zeros(3, VOCAB)
    expected[:, ids] = current.logits(0, 3).softmax(-1) * 400
    for depth in range(3):
        large = expected[depth] > 8
        statistic = ((seen[depth] - expected[depth]).square() / expected[depth])[large].sum()
        assert statistic < 3 * int(large.sum()) + 12


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_draws_name_the_probability_they_had(
    drafter: Drafter, target: Target, ids: Tensor, mode: VerifyMode
) -> None:
    start(drafter, target, 1, text(14, seed=2))
    sampling = SamplingParams(temperature=1.0, seed=4, mode=mode)
    entry = entry_of(drafter, 1, 3, max_nodes=6, sampling=sampling, support_size=VOCAB)
    probs = torch.zeros(3, VOCAB)
    probs[:, ids] = round_of(drafter, 1).logits(0, 3).softmax(-1)
    depths: list[int] = []
    for parent in entry.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    assert entry.draft_dists is not None
    for token, depth, draws in zip(entry.tokens, depths, entry.draft_dists, strict=True):
        assert draws is not None
        assert token in draws.tokens
        assert draws.distribution is not None
        assert draws.distribution.prob(token) == pytest.approx(float(probs[depth, token]), rel=1e-3)
