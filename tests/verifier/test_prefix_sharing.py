"""Shared prefixes: the text stays the plain one, and rows that a slot holds are not run again."""

from __future__ import annotations

from typing import Any

import torch

from paceline.contract.policy import StepPolicy
from paceline.drafts import DraftEntry
from paceline.v1 import peer_pb2, sampling_pb2, target_pb2
from services.verifier.inbox import AddDrafts, Attach, SetPolicy
from services.verifier.specs import sequence_spec
from tests.simulation.verifier import ListedSubscriber
from tests.verifier.conductor import MAX_POSITIONS, VOCAB_SIZE
from tests.verifier.driver import PROMPT, features_of


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
