"""Waiting, preemption and failing alone: the text stays the plain one, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.draft_tree import DraftTree
from paceline.drafts import DraftEntry
from paceline.sampling.rules import RuleError
from services.verifier.inbox import AddDrafts, Attach, Close
from tests.simulation.verifier import ListedSubscriber
from tests.verifier.driver import PROMPT, features_of


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
