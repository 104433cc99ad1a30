"""The dialled drafter: acceptance, agreement of repeated drafts, time, outcomes, confidence."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.dials.dials import Confidence, DialFile, Dials, fixed
from experiments.dials.drafter import DialledDrafter
from experiments.dials.luck import Luck
from experiments.dials.policy import FixedPolicy, read_policy
from experiments.dials.script import Script, ScriptText
from paceline.atomic_write import write_json
from paceline.contract.errors import InvalidRequestError
from paceline.drafts import DraftEntry
from paceline.methods.drafter import (
    Drafter,
    DrafterError,
    DraftRequest,
    OutcomeRequest,
    UnknownDraftSequenceError,
)
from paceline.trie import DraftTrie

VOCAB = 300
NUM_DRAWS = 4000


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def script(num_texts: int = 2, num_tokens: int = NUM_DRAWS) -> Script:
    chooser = random.Random(3)
    texts = [
        ScriptText((index, 7, 9), tuple(chooser.randrange(VOCAB) for _ in range(num_tokens)))
        for index in range(num_texts)
    ]
    return Script(tuple(texts), VOCAB)


def drafter(dials: Dials, of: Script | None = None, fake: FakeTime | None = None) -> DialledDrafter:
    fake = fake or FakeTime()
    return DialledDrafter(of or script(), fixed(dials), fake.clock, fake.sleep)


def opened(dials: Dials, length: int = 3, fake: FakeTime | None = None) -> tuple[DialledDrafter, Script]:
    of = script()
    made = drafter(dials, of, fake)
    made.open(1, of.texts[0].tokens[:length])
    return made, of


def accepted(entry: DraftEntry, right: Sequence[int]) -> int:
    """Tokens of a chain that agree with the text from its start on."""
    count = 0
    for token, expected in zip(entry.tokens, right[entry.start :], strict=False):
        if token != expected:
            break
        count += 1
    return count


def within_binomial_error(hits: int, draws: int, rate: float) -> bool:
    return abs(hits - draws * rate) <= 4 * math.sqrt(draws * rate * (1 - rate))


def test_it_is_a_drafter() -> None:
    assert isinstance(drafter(Dials()), Drafter)


@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.95])
def test_acceptance_comes_out_as_dialled(acceptance: float, spread: float) -> None:
    luck = Luck(Dials(acceptance=acceptance, spread=spread), text=0)
    hits = sum(map(luck.is_right, range(NUM_DRAWS)))
    assert within_binomial_error(hits, NUM_DRAWS, acceptance)


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 0), (1.0, 6)])
def test_the_ends_of_the_scale(acceptance: float, expected: int) -> None:
    made, of = opened(Dials(acceptance=acceptance))
    (entry,) = made.draft([DraftRequest(1, 6)])
    assert entry is not None
    assert accepted(entry, of.texts[0].tokens) == expected


def test_tokens_per_round_are_those_of_the_theory() -> None:
    """A synchronous cycle by hand: (1 - a^(g+1)) / (1 - a) tokens a round."""
    made, of = opened(Dials(acceptance=0.8))
    right, length, rounds = of.texts[0].tokens, 3, 0
    while length + 10 < len(right):
        (entry,) = made.draft([DraftRequest(1, 9)])
        assert entry is not None
        gained = accepted(entry, right) + 1
        made.extend(1, length, right[length : length + gained])
        length, rounds = length + gained, rounds + 1
    expected = (1 - 0.8**10) / 0.2
    assert rounds > 800
    # A round's tokens have a standard deviation of about 3.2.
    assert abs((length - 3) / rounds - expected) < 4 * 3.2 / math.sqrt(rounds)


def test_errors_of_neighbours_are_independent() -> None:
    luck = Luck(Dials(acceptance=0.5), text=0)
    right = [luck.is_right(position) for position in range(NUM_DRAWS)]
    both = sum(a and b for a, b in pairwise(right))
    assert within_binomial_error(both, NUM_DRAWS - 1, 0.25)


def test_repeated_drafts_agree_and_texts_and_seeds_differ() -> None:
    dials = Dials(acceptance=0.5)
    made, _ = opened(dials)
    (first,) = made.draft([DraftRequest(1, 5)])
    (longer,) = made.draft([DraftRequest(1, 40)])
    assert first is not None
    assert longer is not None
    assert longer.tokens[:5] == first.tokens
    again, _ = opened(dials)
    assert again.draft([DraftRequest(1, 40)]) == [longer]
    later, _ = opened(dials, length=23)
    (tail,) = later.draft([DraftRequest(1, 20)])
    assert tail is not None
    assert tail.tokens == longer.tokens[20:]
    lucks = [Luck(dials, 0), Luck(dials, 1), Luck(replace(dials, seed=1), 0)]
    seen = {tuple(luck.is_right(position) for position in range(64)) for luck in lucks}
    assert len(seen) == 3


def test_only_new_tokens_take_time() -> None:
    fake = FakeTime()
    made, of = opened(Dials(acceptance=1.0, draft_ms=2.0, draft_base_ms=1.0), fake=fake)
    made.draft([DraftRequest(1, 5)])
    assert fake.now_s == pytest.approx(0.011)
    made.draft([DraftRequest(1, 8)])
    assert fake.now_s == pytest.approx(0.018)
    made.extend(1, 3, of.texts[0].tokens[3:7])  # four of the eight: four are left
    made.draft([DraftRequest(1, 4)])
    assert fake.now_s == pytest.approx(0.018)
    made.draft([DraftRequest(1, 6)])
    assert fake.now_s == pytest.approx(0.023)


def test_after_an_error_everything_is_drafted_anew() -> None:
    fake = FakeTime()
    made, of = opened(Dials(acceptance=0.0, draft_ms=1.0), fake=fake)
    made.draft([DraftRequest(1, 8)])
    made.extend(1, 3, of.texts[0].tokens[3:4])
    made.draft([DraftRequest(1, 8)])
    assert fake.now_s == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("dials", "expected_s"),
    [
        (Dials(draft_ms=1.0), 0.006),
        (Dials(draft_ms=1.0, lane_cost=1.0), 0.012),
        (Dials(draft_ms=1.0, lane_cost=0.25, draft_base_ms=2.0), 0.0095),
        (Dials(draft_ms=1.0, is_parallel=True), 0.001),
    ],
)
def test_time_over_sequences_and_blocks(dials: Dials, expected_s: float) -> None:
    fake = FakeTime()
    of = script()
    made = drafter(dials, of, fake)
    for which in (0, 1):
        made.open(which, of.texts[which].prompt)
    made.draft([DraftRequest(0, 6), DraftRequest(1, 4)])
    assert fake.now_s == pytest.approx(expected_s)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_outcomes_are_drafted_past_as_often_as_dialled(rate: float) -> None:
    """Where all outcomes fit, a round hits with the rate at an error, and a + (1 - a) rate at its end."""
    dials = Dials(acceptance=0.7, bonus_hit_rate=rate, num_alternatives=2)
    made, of = opened(dials)
    right, length = of.texts[0].tokens, 3
    hits = rounds = 0
    expected = 0.0
    while length + 16 < len(right):
        (entry,) = made.draft([DraftRequest(1, 4)])
        assert entry is not None
        (past,) = made.draft_outcomes([OutcomeRequest(1, 5, 64, 1024)])
        assert past is not None
        past.check(1024, VOCAB)
        assert past.start == length
        assert past.tokens[:4] == entry.tokens
        gained = accepted(entry, right) + 1
        expected += rate if gained <= 4 else 0.7 + 0.3 * rate
        trie = DraftTrie(right[:length])
        trie.add(past)
        matched = trie.commit(right[length : length + gained]).matched
        if matched == gained:
            hits += 1
            assert trie.num_nodes >= 5  # the draft behind it is there
        made.extend(1, length, right[length : length + gained])
        length, rounds = length + gained, rounds + 1
    assert rounds > 1000
    assert abs(hits - expected) <= 4 * math.sqrt(rounds * 0.25)
    if rate == 1.0:
        assert hits == rounds


def test_the_likeliest_outcomes_come_first_and_shares_divide_them() -> None:
    made, _ = opened(Dials(acceptance=0.9, bonus_hit_rate=0.8))
    made.draft([DraftRequest(1, 3)])
    (one,) = made.draft_outcomes([OutcomeRequest(1, 2, 1, 64)])
    assert one is not None
    assert one.parents == (
        -1,
        0,
        1,
        2,
        3,
        4,
    )  # the end of the draft, 0.9 ** 4, before an error at once, 0.1 * 0.8
    (four,) = made.draft_outcomes([OutcomeRequest(1, 2, 4, 64)])
    halves = [
        made.draft_outcomes([OutcomeRequest(1, 2, 4, 64, partition=share, num_partitions=2)])[0]
        for share in (0, 1)
    ]
    assert four is not None
    assert all(half is not None for half in halves)

    def outcome_tokens(entry: DraftEntry) -> list[tuple[int, int]]:
        return [(entry.parents[i], entry.tokens[i]) for i in range(3, len(entry.tokens), 3)]

    divided = [outcome for half in halves if half is not None for outcome in outcome_tokens(half)]
    assert sorted(divided) == sorted(outcome_tokens(four))
    assert len(divided) == len(set(divided)) == 4


def test_outcomes_keep_to_the_node_limit_and_take_their_time() -> None:
    fake = FakeTime()
    made, of = opened(Dials(acceptance=0.8, draft_ms=1.0, lane_cost=0.5), fake=fake)
    made.draft([DraftRequest(1, 4)])
    begun_s = fake.now_s
    (entry,) = made.draft_outcomes([OutcomeRequest(1, 3, 8, 4 + 2 * 4 + 1)])
    assert entry is not None
    assert len(entry.tokens) == 4 + 2 * 4  # two outcomes fit
    assert fake.now_s - begun_s == pytest.approx(0.003 * 1.5)
    made.extend(1, 3, of.texts[0].tokens[3:4])
    assert made.draft_outcomes([OutcomeRequest(1, 3, 8, 64)]) == [None]  # its last draft is of another text


def test_outcomes_are_broken_off_between_two_tokens() -> None:
    fake = FakeTime()
    made, _ = opened(Dials(acceptance=0.8, draft_ms=1.0), fake=fake)
    made.draft([DraftRequest(1, 4)])
    begun_s = fake.now_s

    def until(num_tokens: int) -> list[DraftEntry | None]:
        nonlocal begun_s
        begun_s = fake.now_s
        return made.draft_outcomes(
            [OutcomeRequest(1, 6, 2, 64)], lambda: fake.now_s - begun_s < (num_tokens - 0.5) * 1e-3
        )

    (entry,) = until(2)
    assert entry is not None
    assert len(entry.tokens) == 4 + 2 * (1 + 2)
    assert fake.now_s - begun_s == pytest.approx(0.002)
    assert until(0) == [None]
    assert fake.now_s == begun_s


def test_a_draft_behind_a_hit_is_there_already() -> None:
    fake = FakeTime()
    made, of = opened(Dials(acceptance=0.0, bonus_hit_rate=1.0, draft_ms=1.0), fake=fake)
    made.draft([DraftRequest(1, 4)])
    made.draft_outcomes([OutcomeRequest(1, 6, 1, 64)])
    begun_s = fake.now_s
    made.extend(1, 3, of.texts[0].tokens[3:4])
    made.draft([DraftRequest(1, 6)])
    assert fake.now_s == begun_s
    made.draft([DraftRequest(1, 8)])
    assert fake.now_s == pytest.approx(begun_s + 0.002)


def test_confidences() -> None:
    positions = range(NUM_DRAWS)

    def said(kind: Confidence) -> tuple[list[float], Luck]:
        luck = Luck(Dials(acceptance=0.7, spread=0.8, confidence=kind), text=0)
        return [luck.confidence(position) for position in positions], luck

    calibrated, luck = said(Confidence.CALIBRATED)
    for level in set(calibrated):
        places = [position for position in positions if calibrated[position] == level]
        assert within_binomial_error(sum(map(luck.is_right, places)), len(places), level)
    assert len(set(calibrated)) == 2
    flat, _ = said(Confidence.FLAT)
    assert set(flat) == {0.7}
    inverted, _ = said(Confidence.INVERTED)
    assert all(a + b == pytest.approx(1) for a, b in zip(calibrated, inverted, strict=True))
    noisy, _ = said(Confidence.NOISY)
    assert abs(sum(noisy) / len(noisy) - 0.5) < 0.03


def test_a_text_that_is_not_the_script_s_gets_no_drafts() -> None:
    made, of = opened(Dials())
    made.open(2, (250, 251))
    assert made.draft([DraftRequest(2, 4)]) == [None]
    wrong = (of.texts[0].tokens[3] + 1) % VOCAB
    made.extend(1, 3, [wrong])
    assert made.draft([DraftRequest(1, 4)]) == [None]
    made.close(1)
    made.close(1)
    with pytest.raises(UnknownDraftSequenceError):
        made.draft([DraftRequest(1, 4)])


def test_gaps_are_refused_and_repeats_are_not() -> None:
    made, of = opened(Dials(acceptance=1.0))
    with pytest.raises(DrafterError):
        made.extend(1, 5, [1])
    made.extend(1, 3, of.texts[0].tokens[3:6])
    made.extend(1, 3, of.texts[0].tokens[3:7])
    (entry,) = made.draft([DraftRequest(1, 2)])
    assert entry is not None
    assert entry.start == 7


def test_the_end_of_the_script() -> None:
    of = script(num_tokens=4)
    made = drafter(Dials(acceptance=1.0), of)
    made.open(1, of.texts[0].tokens[:5])
    (entry,) = made.draft([DraftRequest(1, 9)])
    assert entry is not None
    assert len(entry.tokens) == 2
    made.extend(1, 5, of.texts[0].tokens[5:])
    assert made.draft([DraftRequest(1, 9)]) == [None]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"acceptance": 1.2}, "acceptance"),
        ({"acceptance": "high"}, "acceptance"),
        ({"draft_ms": -1}, "draft_ms"),
        ({"num_alternatives": 0}, "num_alternatives"),
        ({"is_parallel": 1}, "is_parallel"),
        ({"confidence": "some"}, "confidence"),
        ({"acceptence": 0.5}, "acceptence"),
        ({"bonus_hit_rate": math.nan}, "bonus_hit_rate"),
    ],
)
def test_bad_dials_name_the_dial(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Dials.from_dict(values)
    assert caught.value.field == field


def test_a_dial_file_is_read_again_and_a_sequence_keeps_its_dials(tmp_path: Path) -> None:
    path = tmp_path / "dials.json"
    write_json(path, Dials(acceptance=1.0).as_dict())
    of = script()
    with pytest.raises(InvalidRequestError):
        DialFile(_written(tmp_path / "bad.json", "[]"))
    made = DialledDrafter(of, DialFile(path), *_no_time())
    made.open(1, of.texts[0].prompt)
    write_json(path, Dials(acceptance=0.0).as_dict())
    made.open(2, of.texts[0].prompt)
    first, second = made.draft([DraftRequest(1, 4), DraftRequest(2, 4)])
    assert first is not None
    assert second is not None
    assert accepted(first, of.texts[0].tokens) == 4
    assert accepted(second, of.texts[0].tokens) == 0


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _no_time() -> tuple:
    fake = FakeTime()
    return fake.clock, fake.sleep


def test_scripts_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    of = script(num_tokens=5)
    of.write(path)
    assert Script.read(path) == of
    for content in (
        "",
        "{}",
        '{"vocab_size": 4, "texts": []}',
        '{"vocab_size": 4, "texts": [{"prompt": [9]}]}',
    ):
        path.write_text(content)
        with pytest.raises(InvalidRequestError):
            Script.read(path)
    assert of.find(of.texts[1].tokens[:5]) == 1
    assert of.find(of.texts[1].prompt[:2]) is None
    assert of.find((5, 5, 5, 5)) is None


def test_policies_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    policy = FixedPolicy(version=3, draft_length=9, num_outcomes=4, draft_ahead=2)
    write_json(path, policy.as_dict())
    assert read_policy(path) == policy
    assert policy.to_proto().num_outcomes == 4
    write_json(path, None)
    assert read_policy(path) is None  # the scheduler's own
    path.write_text(json.dumps({"draft": 3}))
    with pytest.raises(InvalidRequestError):
        read_policy(path)
