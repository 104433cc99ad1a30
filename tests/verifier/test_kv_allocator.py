"""Shared prefixes, waiting and preemption: the text stays the plain one, and each mechanism takes effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry, DraftTree
from paceline.sampling import LogitRule, RuleError, SamplingParams
from paceline.target import TapSpec, TargetEngine
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.runtime import tensors
from services.verifier.inbox import AddDrafts, Attach, Close, Open, SetPolicy
from services.verifier.sequence import SequenceSpec
from services.verifier.specs import sequence_spec
from tests.simulation.verifier import ListedSession, ListedSubscriber, SteppedVerifier
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE

PROMPT = [11 * place % VOCAB_SIZE for place in range(20)]


@pytest.fixture(scope="module")
def engine(target_dir: Path) -> TargetEngine:
    return TargetEngine.load(target_dir, dtype=torch.float32, taps=[TapSpec((1, 3))])


class Driver:
    """One session of a stepped verifier, and what was committed on it."""

    def __init__(self, engine: TargetEngine, **options: Any) -> None:
        self.verifier = SteppedVerifier(engine, **options)
        self.session = ListedSession()
        self.ids: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.failures: list[Any] = []
        self.steps: list[target_pb2.StepReport] = []
        self.ended: list[int] = []

    def open(
        self, key: int, prompt: list[int], num_tokens: int, rule: LogitRule | None = None, **fields: Any
    ) -> None:
        fields = {"stop_token_ids": frozenset(), "max_draft_nodes": 8, **fields}
        spec = SequenceSpec(key, 0, tuple(prompt), SamplingParams(temperature=0.0), num_tokens, **fields)
        self.tokens[key] = []
        self.verifier.put(Open(self.session, spec, rule))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.verifier.step()
            self._read()

    def run(self, *keys: int) -> list[list[int]]:
        for _ in range(2000):
            if set(keys) <= set(self.ended):
                break
            self.step()
        return [self.tokens[key] for key in keys]

    def num_rows(self) -> int:
        rows = sum(stats.num_rows for stats in self.verifier.stats)
        self.verifier.stats.clear()
        return rows

    def _read(self) -> None:
        for frame in self.session.take():
            for opened in frame.opened:
                self.ids[opened.sequence_id] = opened.key
            self.failures.extend(frame.failures)
            self.ended += [failure.key or self.ids[failure.sequence_id] for failure in frame.failures]
            if not frame.HasField("step"):
                continue
            self.steps.append(frame.step)
            begin = 0
            for which, sequence_id in enumerate(frame.step.commits.sequence_ids):
                end = begin + frame.step.commits.sizes[which]
                self.tokens[self.ids[sequence_id]] += frame.step.commits.tokens[begin:end]
                begin = end
                if frame.step.finish_reasons[which]:
                    self.ended.append(self.ids[sequence_id])

    def sequence_id(self, key: int) -> int:
        return next(sequence_id for sequence_id, own in self.ids.items() if own == key)


@pytest.fixture
def drive(engine: TargetEngine) -> Iterator[Any]:
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(engine, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.verifier.close()


def test_a_prompt_that_was_run_before_runs_one_row(drive: Any, plain_text: Any) -> None:
    driver = drive()
    driver.open(1, PROMPT, 6)
    assert driver.run(1) == [plain_text(PROMPT, 6)]
    assert driver.num_rows() == len(PROMPT) + 5
    driver.open(2, PROMPT, 6)
    assert driver.run(2) == [plain_text(PROMPT, 6)]
    assert driver.num_rows() == 6
    assert driver.verifier.kv_allocator.num_reused_tokens == len(PROMPT) - 1


def test_the_next_turn_of_a_conversation_takes_over_the_kept_slot(drive: Any, plain_text: Any) -> None:
    driver = drive()
    driver.open(1, PROMPT, 6)
    [answer] = driver.run(1)
    driver.num_rows()
    turn = [*PROMPT, *answer, 5, 9]
    driver.open(2, turn, 6)
    assert driver.run(2) == [plain_text(turn, 6)]
    assert driver.num_rows() == 3 + 5  # the answer's last token was never run
    assert driver.verifier.kv_allocator.num_adopted == 1


def test_a_running_sequence_shares_what_it_has_run(drive: Any, plain_text: Any) -> None:
    driver = drive()
    driver.open(1, PROMPT, 30)
    driver.step(4)
    branch = [*PROMPT[:15], 1, 2]
    driver.open(2, branch, 8)
    assert driver.run(1, 2) == [plain_text(PROMPT, 30), plain_text(branch, 8)]
    assert driver.verifier.kv_allocator.num_reused_tokens == 15
    assert driver.verifier.kv_allocator.num_copied == 1


def test_without_the_cache_every_prompt_is_run(drive: Any, plain_text: Any) -> None:
    driver = drive(prefix_cache_bytes=0)
    for key in (1, 2):
        driver.open(key, PROMPT, 6)
        assert driver.run(key) == [plain_text(PROMPT, 6)]
        assert driver.num_rows() == len(PROMPT) + 5


def test_prompt_log_probs_need_every_row() -> None:
    info = peer_pb2.PeerInfo(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS)
    opening = target_pb2.OpenSequence(key=1, prompt_token_ids=PROMPT, max_new_tokens=4)
    assert sequence_spec(opening, info).may_share_prefix
    opening.log_probs.CopyFrom(sampling_pb2.LogProbOptions(num_prompt_top=0))
    assert not sequence_spec(opening, info).may_share_prefix


def test_a_request_that_may_not_share_runs_its_prompt(drive: Any) -> None:
    driver = drive()
    driver.open(1, PROMPT, 4)
    driver.run(1)
    driver.num_rows()
    driver.open(2, PROMPT, 4, may_share_prefix=False)
    driver.run(2)
    assert driver.num_rows() == len(PROMPT) + 3


def features_of(driver: Driver, subscriber: ListedSubscriber, key: int) -> torch.Tensor:
    """What a drafter has been told about a sequence; each position once, in order."""
    parts, length = [], 0
    for chunk in subscriber.chunks:
        if chunk.sequence_id == driver.sequence_id(key):
            assert chunk.start == length
            parts.append(tensors.decode(chunk.features, 1 << 20))
            length += len(parts[-1])
    return torch.cat(parts)


def test_features_of_a_shared_prefix_reach_the_drafter(drive: Any) -> None:
    driver = drive()
    subscriber = ListedSubscriber("d")
    driver.verifier.features.subscribe(subscriber)

    def opened(key: int, prompt: list[int]) -> torch.Tensor:
        driver.open(key, prompt, 8)
        driver.step()
        driver.verifier.put(Attach(driver.session, driver.sequence_id(key), "d", 0))
        driver.run(key)
        return features_of(driver, subscriber, key)

    first = opened(1, PROMPT)
    again = opened(2, PROMPT)
    assert driver.verifier.kv_allocator.num_reused_tokens == len(PROMPT) - 1
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)


def test_a_prefix_without_features_is_not_for_drafters(drive: Any) -> None:
    driver = drive()
    driver.open(1, PROMPT, 4, max_draft_nodes=0)
    driver.run(1)
    driver.num_rows()
    driver.open(2, PROMPT, 4)
    driver.run(2)
    assert driver.num_rows() == len(PROMPT) + 3
    driver.open(3, PROMPT, 4, max_draft_nodes=0)
    driver.run(3)
    assert driver.num_rows() == 4


def test_rows_behind_a_stop_token_are_not_kept(drive: Any, plain_text: Any) -> None:
    text = plain_text(PROMPT, 30)
    stop = next(token for place, token in enumerate(text) if place >= 4 and token not in text[:place])
    driver = drive()
    driver.open(1, PROMPT, 30, stop_token_ids=frozenset({stop}), max_draft_nodes=16)
    driver.verifier.put(SetPolicy(StepPolicy(max_nodes_per_sequence=16)))
    driver.step()
    entry = DraftEntry.chain(len(PROMPT) + 1, text[1:17])
    driver.verifier.put(AddDrafts(driver.session, ((driver.sequence_id(1), 0, entry),), 0))
    [answer] = driver.run(1)
    assert answer == text[: text.index(stop) + 1]
    assert len(driver.steps) == 2
    turn = [*PROMPT, *answer, 3, 3]
    driver.open(2, turn, 12)
    assert driver.run(2) == [plain_text(turn, 12)]


def test_the_youngest_are_preempted_and_all_end(
    drive: Any, plain_text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.kv_allocator.GROWTH_TOKENS", 8)
    driver = drive(kv_limit_tokens=256, prefix_cache_bytes=0)
    prompts = [PROMPT[place:] for place in range(6)]
    for key, prompt in enumerate(prompts, start=1):
        driver.open(key, prompt, 70)
    assert driver.run(*range(1, 7)) == [plain_text(prompt, 70) for prompt in prompts]
    assert driver.verifier.kv_allocator.num_preemptions > 0
    assert driver.ended == [1, 2, 3, 4, 5, 6]  # nobody overtakes
    assert not driver.failures


def test_features_are_not_pushed_twice_after_a_preemption(drive: Any, plain_text: Any) -> None:
    driver = drive(kv_limit_tokens=512, prefix_cache_bytes=0)
    subscriber = ListedSubscriber("d")
    driver.verifier.features.subscribe(subscriber)
    for key in (1, 2):
        driver.open(key, PROMPT[key:], 60)
    driver.step()
    for key in (1, 2):
        driver.verifier.put(Attach(driver.session, driver.sequence_id(key), "d", 0))
    driver.step(8)
    with torch.inference_mode():
        preempted = driver.verifier.table.preempt_youngest()
    assert preempted.sequence_id == driver.sequence_id(2)
    assert preempted.num_cached == 0
    assert driver.run(1, 2) == [plain_text(PROMPT[key:], 60) for key in (1, 2)]
    for key in (1, 2):
        assert len(features_of(driver, subscriber, key)) == len(PROMPT[key:]) + 59


def test_a_sequence_that_can_never_fit_fails_alone(drive: Any, plain_text: Any) -> None:
    driver = drive(kv_limit_tokens=128, prefix_cache_bytes=0)
    driver.open(1, [*range(1, 50)] * 3, 4)
    driver.open(2, PROMPT, 170)
    driver.open(3, PROMPT[3:], 20)
    _, third = driver.run(2, 3)
    assert third == plain_text(PROMPT[3:], 20)
    assert [failure.reason for failure in driver.failures] == ["KV_CACHE_EXHAUSTED"] * 2
    assert driver.failures[0].key == 1
    # The second got as far as the cache reaches: one token for every row, and the root is not in it.
    assert len(driver.tokens[2]) == 128 - len(PROMPT) + 1
    assert driver.tokens[2] == plain_text(PROMPT, len(driver.tokens[2]))


def test_kept_prefixes_are_evicted_before_a_preemption(drive: Any, plain_text: Any) -> None:
    driver = drive(kv_limit_tokens=512)
    for key, first in ((1, 40), (2, 41)):
        driver.open(key, [first, *PROMPT], 4)
        driver.run(key)
    assert driver.verifier.table.kv_allocator.num_kept == 2
    driver.open(3, [42, *PROMPT], 170)
    assert driver.run(3) == [plain_text([42, *PROMPT], 170)]
    assert driver.verifier.kv_allocator.num_preemptions == 0


def test_closing_a_waiting_sequence_leaves_nothing(drive: Any) -> None:
    driver = drive(kv_limit_tokens=128, prefix_cache_bytes=0)
    for key in (1, 2):
        driver.open(key, PROMPT, 60)
    driver.step(2)
    assert len(driver.verifier.table.waiting) == 1
    for key in (2, 1):
        driver.verifier.put(Close(driver.session, driver.sequence_id(key)))
    driver.step()
    assert driver.verifier.table.num_unfinished == 0


class RefusesTrees:
    """A rule that allows no token once something was drafted."""

    def apply(self, logits: torch.Tensor, tree: DraftTree) -> None:
        if len(tree):
            raise RuleError("constraint", "cannot go on")

    def commit(self, tokens: Sequence[int]) -> None:
        pass


def test_a_sequence_that_fails_in_the_middle_of_a_step_keeps_no_prefix(drive: Any, plain_text: Any) -> None:
    """Its slot holds the rows of a tree without a verdict."""
    driver = drive()
    driver.open(1, PROMPT, 6, rule=RefusesTrees())
    driver.step(1)
    fork = DraftEntry(len(PROMPT) + 1, (1, 2, 3), (-1, -1, 0))
    driver.verifier.put(AddDrafts(driver.session, ((driver.sequence_id(1), 0, fork),), 0))
    assert driver.run(1) == [plain_text(PROMPT, 1)]
    assert [failure.reason for failure in driver.failures] == ["INVALID_FIELD"]
    driver.num_rows()
    driver.open(2, PROMPT, 6)
    assert driver.run(2) == [plain_text(PROMPT, 6)]
    assert driver.num_rows() == len(PROMPT) + 5
